"""A channel: one connection at a time to one engine, made again whenever it is lost."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from npufleet.cluster.transport.base import LinkSettings, Listening, OnMessage, Pairs, Tls
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.call import Http2Call
from npufleet.cluster.transport.http2.connection import Connection
from npufleet.cluster.transport.http2.headers import HeaderWriter

State = grpc.ChannelConnectivity
_Code = grpc.StatusCode
_FIRST_PAUSE = 0.1
_GROWTH = 1.6


class Http2Channel:
    """``EngineChannel`` over our own HTTP/2 client. Belongs to the event loop it is first used in.

    A call waits while the first connection is being made and fails at once with UNAVAILABLE while the engine
    cannot be reached, as grpcio's do; ``wait_for_ready=True`` waits in each case.
    """

    def __init__(self, address: str, settings: LinkSettings, tls: Tls | None = None) -> None:
        self._host, self._port = split_address(address)
        self._address = address
        self._settings = settings
        self._tls: ssl.SSLContext | None = None if tls is None else tls.context()
        self._server_name = tls.server_name if tls is not None else None
        authority = self._server_name or address
        self._writer = HeaderWriter(authority, "http" if tls is None else "https")
        self._connection: Connection | None = None  # the one that takes new calls
        self._old: set[Connection] = set()  # those that only finish what they have
        self._waiting: dict[Http2Call, bool] = {}  # in order; True: also while the engine cannot be reached
        self._dialling: asyncio.Task[None] | None = None
        self._state = State.IDLE
        self._changed = asyncio.Event()
        self._problem = ""

    # grpc.aio's interface

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_unary``."""
        return self._callable(method, True, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_stream``."""
        return self._callable(method, False, *args, **kwargs)

    def listen(
        self, method: str, request: bytes, *, on_message: OnMessage, metadata: Pairs, timeout: float
    ) -> Listening:
        """Hand each message over within the read of the socket that brought it."""
        call = Http2Call(
            method, request, unary=False, limit=self._settings.max_message_bytes, on_message=on_message
        )
        self._begin(call, metadata, timeout, wait=False)
        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As ``grpc.aio.Channel.get_state``."""
        if try_to_connect and self._state is State.IDLE:
            self._dial()
        return self._state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As ``grpc.aio.Channel.wait_for_state_change``."""
        while self._state is last_observed_state:
            await self._changed.wait()

    def drop(self, reason: str) -> None:
        """Break the connection: its calls end with UNAVAILABLE, and the next connection is made when needed."""
        for connection in (*self._old, *([] if self._connection is None else [self._connection])):
            connection.abort(frames.NO_ERROR, reason)

    async def close(self, grace: float | None = None) -> None:
        """Close it; calls that still run after ``grace`` seconds are cancelled."""
        if self._state is State.SHUTDOWN:
            return
        self._set(State.SHUTDOWN)
        connections = [*self._old, *([] if self._connection is None else [self._connection])]
        if grace and any(connection.calls for connection in connections):
            loop = asyncio.get_running_loop()
            until = loop.time() + grace
            while any(connection.calls for connection in connections) and loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.gather(self._dialling, return_exceptions=True)
        for connection in connections:
            connection.cancel_calls()
            connection.abort(frames.NO_ERROR, "the channel was closed")
        for call in list(self._waiting):
            call.cancel()

    # what its connections tell

    def on_ready(self, connection: Connection) -> None:
        """A connection is up."""
        self._connection = connection
        self._problem = ""
        self._set(State.READY)
        self.on_room(connection)

    def on_room(self, connection: Connection) -> None:
        """Calls that wait may start."""
        if connection is self._connection:
            self._start_waiting()

    def on_draining(self, connection: Connection) -> None:
        """The engine closes this connection in peace: make the next one."""
        if connection is self._connection:
            self._connection = None
            self._old.add(connection)
            if self._state is not State.SHUTDOWN:
                self._dial()

    def on_unheard(self, calls: list[Http2Call]) -> None:
        """What the engine did not look at starts over, once."""
        for call in calls:
            if call.moved or call.answered or self._state is State.SHUTDOWN:
                call.finish(_Code.UNAVAILABLE, "the peer refused the call before it looked at it")
            else:
                call.moved, call.connection, call.unsent = True, None, call.request
                self._enqueue(call, wait=False)

    def on_lost(self, connection: Connection, reason: str) -> None:
        """A connection is gone."""
        self._old.discard(connection)
        if connection is self._connection:
            self._connection = None
            if self._state is not State.SHUTDOWN:
                self._problem = reason
                self._set(State.IDLE)
                if self._waiting:
                    self._dial()

    # its own

    def _callable(
        self,
        method: str,
        unary: bool,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., Http2Call]:
        def make(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Pairs | None = None,
            wait_for_ready: bool | None = None,
        ) -> Http2Call:
            raw = request if request_serializer is None else request_serializer(request)
            limit = self._settings.max_message_bytes
            call = Http2Call(method, raw, unary=unary, limit=limit, decode=response_deserializer)
            self._begin(call, metadata or (), timeout, wait=bool(wait_for_ready))
            return call

        return make

    def _begin(self, call: Http2Call, metadata: Pairs, timeout: float | None, *, wait: bool) -> None:
        call.block, call.headers_size = self._writer.write(call.path, timeout, metadata)
        if timeout is not None:
            call.start_deadline(asyncio.get_running_loop(), timeout)
        connection = self._connection
        if connection is not None and not self._waiting and connection.room > 0:
            connection.start(call)
        elif self._state is State.SHUTDOWN:
            call.finish(_Code.UNAVAILABLE, "the channel is closed")
        elif self._state is State.TRANSIENT_FAILURE and not wait:
            call.finish(_Code.UNAVAILABLE, f"{self._address} cannot be reached: {self._problem}")
        else:
            self._enqueue(call, wait=wait)

    def _enqueue(self, call: Http2Call, *, wait: bool) -> None:
        if len(self._waiting) >= self._settings.max_waiting:
            call.finish(
                _Code.RESOURCE_EXHAUSTED, f"{len(self._waiting)} calls already wait for {self._address}"
            )
            return
        self._waiting[call] = wait
        call.leave = self._leave
        if self._connection is None:
            self._dial()
        else:
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._connection is not None and self._connection.room > 0:
            call = next(iter(self._waiting))
            self._leave(call)
            self._connection.start(call)

    def _leave(self, call: Http2Call) -> None:
        self._waiting.pop(call, None)
        call.leave = None

    def _set(self, state: grpc.ChannelConnectivity) -> None:
        if state is not self._state:
            self._state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _dial(self) -> None:
        if self._dialling is None or self._dialling.done():
            if self._state is not State.READY:
                self._set(State.CONNECTING)
            self._dialling = asyncio.get_running_loop().create_task(
                self._connect(), name=f"dial {self._address}"
            )

    async def _connect(self) -> None:
        """Try until a connection is up."""
        pause = min(_FIRST_PAUSE, self._settings.reconnect_backoff)
        while True:
            problem = await self._try()
            if not problem:
                return
            self._problem = problem
            self._set(State.TRANSIENT_FAILURE)
            for call, waits in list(self._waiting.items()):
                if not waits:
                    call.finish(_Code.UNAVAILABLE, f"{self._address} cannot be reached: {problem}")
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * _GROWTH, self._settings.reconnect_backoff)
            self._set(State.CONNECTING)

    async def _try(self) -> str:
        """Make one connection; "" or why there is none."""
        loop = asyncio.get_running_loop()
        made = Connection(self, self._settings, loop)
        tls: dict[str, Any] = {}
        if self._tls is not None:
            tls = {"ssl": self._tls, "server_hostname": self._server_name or self._host}
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                transport, _ = await loop.create_connection(lambda: made, self._host, self._port, **tls)
                if (
                    self._tls is not None
                    and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2"
                ):
                    made.abort(frames.PROTOCOL_ERROR, "the peer does not speak HTTP/2")
                await made.opened.wait()
        except TimeoutError:
            made.abort(frames.SETTINGS_TIMEOUT, "no connection in time")
            return f"no connection within {self._settings.connect_timeout:g} s"
        except (OSError, ssl.SSLError) as error:
            return str(error)
        except asyncio.CancelledError:
            with suppress(Exception):
                made.abort(frames.NO_ERROR, "the channel was closed")
            raise
        return "" if self._connection is made else made.reason


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, an IPv6 host in brackets; ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
