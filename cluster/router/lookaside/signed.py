"""A link to an engine whose calls carry the router's own token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from npufleet.cluster.router.lookaside.tokens import TOKEN_KEY, TokenMint
from npufleet.cluster.transport.base import EngineChannel, Listening, OnMessage, Pairs


class SignedChannel:
    """``channel`` with a token in the metadata of each call; a client's own attempt at one is left out."""

    def __init__(self, channel: EngineChannel, mint: TokenMint) -> None:
        self._channel = channel
        self._mint = mint

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_unary``."""
        return self._signing(self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_stream``."""
        return self._signing(self._channel.unary_stream(method, *args, **kwargs))

    def listen(
        self, method: str, request: bytes, *, on_message: OnMessage, metadata: Pairs, timeout: float
    ) -> Listening:
        """As :meth:`EngineChannel.listen`."""
        signed = self._sign(metadata)
        return self._channel.listen(method, request, on_message=on_message, metadata=signed, timeout=timeout)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As ``grpc.aio.Channel.get_state``."""
        return self._channel.get_state(try_to_connect)

    def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> Awaitable[None]:
        """As ``grpc.aio.Channel.wait_for_state_change``."""
        return self._channel.wait_for_state_change(last_observed_state)

    def drop(self, reason: str) -> None:
        """As :meth:`EngineChannel.drop`."""
        self._channel.drop(reason)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel."""
        await self._channel.close(grace)

    def _sign(self, metadata: Pairs | None) -> Pairs:
        rest = [pair for pair in metadata or () if pair[0] != TOKEN_KEY]
        return (*rest, (TOKEN_KEY, self._mint.fleet()))

    def _signing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def begin(request: Any, *, metadata: Pairs | None = None, **kwargs: Any) -> Any:
            return call(request, metadata=self._sign(metadata), **kwargs)

        return begin
