"""Transports by name. A transport's module is imported when it is asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from npufleet.cluster.transport.base import EngineChannel, LinkSettings, Tls

DEFAULT_TRANSPORT = "http2"
_TRANSPORTS = {
    "http2": ("npufleet.cluster.transport.http2.channel", "Http2Channel"),
    "grpcio": ("npufleet.cluster.transport.grpcio", "GrpcioChannel"),
}


def known_transports() -> tuple[str, ...]:
    """The names that :func:`open_channel` takes."""
    return tuple(sorted(_TRANSPORTS))


def check_transport(name: str) -> str:
    """``name`` where it is one; ValueError names the nearest and the known ones."""
    if name in _TRANSPORTS:
        return name
    near = difflib.get_close_matches(name, _TRANSPORTS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"unknown transport {name!r}{hint}; known: {', '.join(known_transports())}")


def open_channel(
    name: str, address: str, settings: LinkSettings | None = None, tls: Tls | None = None
) -> EngineChannel:
    """A channel to the engine at ``address`` (host:port) over the transport ``name``, in the running loop.

    It connects when it is first used. ValueError for an unknown transport, an address that is none or TLS
    files that cannot be used.
    """
    from npufleet.cluster.transport.base import LinkSettings

    module, attribute = _TRANSPORTS[check_transport(name)]
    kind = getattr(import_module(module), attribute)
    return cast("EngineChannel", kind(address, settings or LinkSettings(), tls))
