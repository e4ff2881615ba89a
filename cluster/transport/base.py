"""What router and gateway need of a link to an engine.

An :class:`EngineChannel` is the part of ``grpc.aio.Channel`` that they use, so generated stubs work over each
transport, and calls raise ``grpc.aio.AioRpcError`` whoever made them. On top of it comes :meth:`~EngineChannel.listen`,
which hands messages over as they are read, without a task that waits for each.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from npufleet.cluster.tls import no_password

if TYPE_CHECKING:
    import grpc

Pairs = Sequence[tuple[str, str | bytes]]
OnMessage = Callable[[bytes], None]


class Listening(Protocol):
    """A server stream whose messages go to a callback."""

    def cancel(self) -> bool:
        """End it; waiting for it then raises ``asyncio.CancelledError``. False where it has ended already."""
        ...

    def __await__(self) -> Any:
        """Wait for its end: returns its trailing metadata, raises ``AioRpcError`` for a status that is not
        OK."""
        ...


class EngineChannel(Protocol):
    """A link to one engine, which connects by itself and reconnects for as long as it is open."""

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_unary``."""
        ...

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``grpc.aio.Channel.unary_stream``."""
        ...

    def listen(
        self, method: str, request: bytes, *, on_message: OnMessage, metadata: Pairs, timeout: float
    ) -> Listening:
        """Call a server-streaming ``method``; ``on_message`` gets each message as its bytes, in order.

        ``timeout`` is in seconds. What ``on_message`` raises ends the call with INTERNAL.
        """
        ...

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As ``grpc.aio.Channel.get_state``."""
        ...

    def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> Awaitable[None]:
        """As ``grpc.aio.Channel.wait_for_state_change``."""
        ...

    def drop(self, reason: str) -> None:
        """Break the connection: its calls end (UNAVAILABLE; cancelled over grpcio) and the next one is made."""
        ...

    async def close(self, grace: float | None = None) -> None:
        """Close it; calls that still run are cancelled (after ``grace`` seconds)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files of a TLS link to engines: whom to trust, and what to show (mutual TLS)."""

    ca: Path | None = None  # None: the system's authorities
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None  # the name in the engines' certificates, where it is not their address

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate and its key are given together or not at all")

    def context(self) -> ssl.SSLContext:
        """For asyncio, offering HTTP/2 alone. ValueError for files that cannot be used."""
        try:
            made = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.certificate is not None:
                made.load_cert_chain(str(self.certificate), str(self.key), password=no_password)
        except OSError as error:  # ssl.SSLError is one
            named = ", ".join(str(file) for file in (self.ca, self.certificate, self.key) if file is not None)
            raise ValueError(f"the TLS files for engines cannot be used ({named}): {error}") from error
        made.minimum_version = ssl.TLSVersion.TLSv1_2  # what HTTP/2 asks for (RFC 9113, 9.2)
        made.set_alpn_protocols(["h2"])
        return made

    def credentials(self) -> grpc.ChannelCredentials:
        """For grpcio. ValueError for files that cannot be read."""
        import grpc  # commands read settings of links without it

        try:
            ca, key, chain = (
                None if file is None else file.read_bytes() for file in (self.ca, self.key, self.certificate)
            )
        except OSError as error:
            raise ValueError(f"the TLS files for engines cannot be read: {error}") from error
        return grpc.ssl_channel_credentials(ca, key, chain)


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Times are seconds, sizes are bytes. A value that is not positive is a ValueError."""

    keepalive_time: float = 5.0  # a ping goes out after this much silence
    keepalive_timeout: float = 2.0  # and the peer counts as lost when nothing comes back within this
    connect_timeout: float = 5.0  # from dialling to the peer's settings
    reconnect_backoff: float = 1.0  # the longest pause between two connection attempts
    max_metadata_bytes: int = 16 << 10  # of the headers or trailers of one answer
    max_message_bytes: int = 1 << 30  # of one message of an answer
    max_waiting: int = 8192  # calls that wait for a connection or for a free stream; more are refused

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value <= 0:
                raise ValueError(f"link setting {item.name} must be above 0, got {value!r}")
