"""Links over grpcio: the reference that our own transport is held against."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from npufleet.cluster.transport.base import LinkSettings, Listening, OnMessage, Pairs, Tls


class GrpcioChannel:
    """A ``grpc.aio.Channel`` with the options of a link to an engine."""

    def __init__(self, address: str, settings: LinkSettings, tls: Tls | None = None) -> None:
        self._address = address
        self._options: list[tuple[str, Any]] = list(channel_options(settings))
        self._credentials = None if tls is None else tls.credentials()
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._channel = self._open()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waits: set[asyncio.Task[None]] = set()  # for another state of the channel

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_unary``."""
        return self._on_the_newest(lambda channel: channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_stream``."""
        return self._on_the_newest(lambda channel: channel.unary_stream(method, *args, **kwargs))

    def listen(
        self, method: str, request: bytes, *, on_message: OnMessage, metadata: Pairs, timeout: float
    ) -> Listening:
        """Read the stream in a task that calls ``on_message``."""
        call = self._channel.unary_stream(method)(request, metadata=tuple(metadata), timeout=timeout)
        return self._keep(asyncio.create_task(_pump(call, on_message)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As ``grpc.aio.Channel.get_state``."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As ``grpc.aio.Channel.wait_for_state_change``; it also returns when the channel is dropped."""
        wait = asyncio.create_task(self._channel.wait_for_state_change(last_observed_state))
        self._waits.add(wait)
        try:
            await asyncio.wait((wait,))
            if not wait.cancelled():
                wait.result()
        finally:
            wait.cancel()
            self._waits.discard(wait)

    def drop(self, reason: str) -> None:
        """Go on with another channel; calls on the old one are cancelled. ``reason`` is not passed on."""
        old, self._channel = self._channel, self._open()
        for wait in self._waits:
            wait.cancel()
        self._keep(asyncio.create_task(old.close(None)))

    async def close(self, grace: float | None = None) -> None:
        """Close it."""
        await self._channel.close(grace)

    def _on_the_newest(self, make: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> Callable[..., Any]:
        """What ``make`` makes of the channel, made again once that one has been dropped."""
        channel, call = self._channel, make(self._channel)

        def begin(*args: Any, **kwargs: Any) -> Any:
            nonlocal channel, call
            if channel is not self._channel:
                channel, call = self._channel, make(self._channel)
            return call(*args, **kwargs)

        return begin

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _pump(call: Any, on_message: OnMessage) -> Any:
    try:
        async for message in call:
            if fault := _hand_over(message, on_message):
                none = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, fault)
        return await call.trailing_metadata()
    finally:
        call.cancel()  # does nothing to a stream that has ended


def _hand_over(message: bytes, on_message: OnMessage) -> str:
    try:
        on_message(message)
    except Exception as error:  # noqa: BLE001 - supervisor: a reader's fault ends its call, not the others
        return f"the answer could not be used: {error!r}"
    return ""


def channel_options(settings: LinkSettings) -> list[tuple[str, int]]:
    """gRPC channel options of a link to an engine.

    ``grpc.http2.ping_timeout_ms`` is what bounds the discovery of a frozen peer; the keepalive timeout alone
    leaves it at a minute.
    """
    timeout_ms = int(settings.keepalive_timeout * 1000)
    backoff_ms = int(settings.reconnect_backoff * 1000)
    return [
        ("grpc.keepalive_time_ms", int(settings.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", min(100, backoff_ms)),
        ("grpc.min_reconnect_backoff_ms", min(100, backoff_ms)),
        ("grpc.max_reconnect_backoff_ms", backoff_ms),
        ("grpc.enable_retries", 0),  # the router retries, on another engine
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # its own connection, so its own state
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
    ]
