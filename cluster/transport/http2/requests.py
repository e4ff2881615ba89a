"""The headers of a call that comes in (gRPC over HTTP/2, "Requests"; RFC 9113, 8.3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpack import Decoder
from hpack.exceptions import HPACKError

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.headers import (
    FIELD,
    allowed_name,
    allowed_value,
    plain_bytes,
    plain_text,
)

_MOST_HEADERS = 1 << 20  # bytes in memory; more ends the connection, since HPACK's state is lost
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_OF_THIS_HOP = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})
_PSEUDO = frozenset({":method", ":scheme", ":path", ":authority"})


@dataclass(kw_only=True, slots=True)
class Request:
    """What the headers of a call say."""

    path: str
    size: int  # of its headers as they count in memory, in bytes (RFC 9113, 6.5.2)
    refused: int = 0  # the HTTP status of what is no gRPC request
    timeout: float | None = None  # seconds
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    streams: bool = False  # its method takes many messages


class RequestReader:
    """Decodes the header blocks of one client's connection."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=_MOST_HEADERS)

    def pairs(self, block: bytes) -> Any:
        """The fields of ``block``. ProtocolError for what is not HPACK, or too much of it."""
        try:
            return self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError) as error:
            raise frames.ProtocolError(frames.COMPRESSION_ERROR, f"headers: {error}") from error


def read(pairs: Any) -> Request:
    """What ``pairs`` ask for. Raises StreamError for what is no HTTP/2 request."""
    pseudo: dict[str, str] = {}
    metadata: list[tuple[str, str | bytes]] = []
    size, timeout, kind = 0, None, ""
    for raw_name, raw_value in pairs:
        name = raw_name.decode("latin-1")
        size += len(raw_name) + len(raw_value) + FIELD
        if name.startswith(":"):
            if name not in _PSEUDO or name in pseudo or metadata:
                raise frames.StreamError(frames.PROTOCOL_ERROR, f"a misplaced {name[:20]!r}")
            pseudo[name] = raw_value.decode("latin-1")
        elif name != name.lower() or name in ("connection", "transfer-encoding", "keep-alive"):
            raise frames.StreamError(frames.PROTOCOL_ERROR, f"a header {name[:20]!r}")
        elif name == "content-type":
            kind = raw_value.decode("latin-1")
        elif name == "grpc-timeout":
            timeout = timeout_seconds(raw_value.decode("latin-1"))
        elif name not in _OF_THIS_HOP:
            binary = name.endswith("-bin")
            if not allowed_name(name) or not (binary or allowed_value(raw_value)):
                raise frames.StreamError(
                    frames.PROTOCOL_ERROR, f"metadata {name[:20]!r}, which gRPC does not allow"
                )
            value = plain_bytes(raw_value.decode("latin-1")) if binary else plain_text(raw_value)
            metadata.append((name, value))
    if pseudo.keys() < {":method", ":path"} or not pseudo.get(":path"):
        raise frames.StreamError(frames.PROTOCOL_ERROR, "no method or no path")
    refused = 405 if pseudo.get(":method") != "POST" else 0 if kind.startswith("application/grpc") else 415
    return Request(
        path=pseudo[":path"], size=size, refused=refused, timeout=timeout, metadata=tuple(metadata)
    )


def timeout_seconds(text: str) -> float:
    """What ``grpc-timeout`` says. Raises StreamError where that is nothing."""
    digits, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        raise frames.StreamError(frames.PROTOCOL_ERROR, f"grpc-timeout {text[:20]!r}")
    return int(digits) * _UNITS[unit]
