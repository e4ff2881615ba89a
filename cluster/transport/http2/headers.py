"""gRPC's headers as HPACK blocks (RFC 7541, gRPC over HTTP/2).

Both directions do without the dynamic table: we write literals that are never indexed, and tell the peer that our
table has no room. A block then means the same wherever it stands, so blocks that return (the headers and trailers
of a plain answer) are decoded once.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from npufleet.cluster.transport.base import Pairs
from npufleet.cluster.transport.http2 import frames, status

_REMEMBERED = 256
_LONGEST_REMEMBERED = 1024
_NOT_METADATA = frozenset(
    {"content-type", "te", "grpc-status", "grpc-message", "grpc-encoding", "grpc-accept-encoding"}
)
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
FIELD = 32  # what a header counts for beside its name and value (RFC 9113, 6.5.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What one header block of an answer says."""

    http: int | None  # the HTTP status; trailers have none
    content_type: str
    code: grpc.StatusCode | None  # the gRPC status, where there is one
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]


class HeaderTooLarge(Exception):
    """A header block is above the limit."""


class HeaderReader:
    """Decodes the header blocks of one connection; ``limit`` bounds a block as it counts in memory, in bytes."""

    def __init__(self, limit: int) -> None:
        self._decoder = Decoder(max_header_list_size=limit)
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0
        self._known: dict[bytes, Block] = {}

    def read(self, block: bytes) -> Block:
        """What ``block`` says. Raises :class:`HeaderTooLarge`, or ProtocolError for what is not HPACK."""
        found = self._known.get(block)
        if found is not None:
            return found
        try:
            pairs = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise HeaderTooLarge from error
        except (HPACKError, IndexError) as error:
            raise frames.ProtocolError(
                frames.COMPRESSION_ERROR, f"headers that are not HPACK: {error}"
            ) from error
        made = _block(pairs)
        if len(block) <= _LONGEST_REMEMBERED:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = made
        return made


def _block(pairs: Any) -> Block:
    http: int | None = None
    code: grpc.StatusCode | None = None
    message = content_type = ""
    metadata: list[tuple[str, str | bytes]] = []
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name == ":status":
            http = int(value) if value.isascii() and value.isdigit() else 0
        elif name == "grpc-status":
            number = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else 2
            code = status.BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
        elif name == "grpc-message":
            message = unquote(value, errors="replace")
        elif name == "content-type":
            content_type = value
        elif name not in _NOT_METADATA and not name.startswith(":"):
            metadata.append((name, plain_bytes(value) if name.endswith("-bin") else plain_text(raw_value)))
    return Block(http=http, content_type=content_type, code=code, message=message, metadata=tuple(metadata))


def plain_text(value: bytes) -> str:
    """A header's value as text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def plain_bytes(value: str) -> bytes:
    """Base64 with or without its padding; what is not base64 stays as it is."""
    try:
        return b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        return value.encode("latin-1")


class HeaderWriter:
    """Encodes the header blocks of requests to one authority."""

    def __init__(self, authority: str, scheme: str) -> None:
        self._authority = authority
        self._scheme = scheme
        self._encoder = Encoder()
        self._starts: dict[str, tuple[bytes, int]] = {}  # paths are those of a service: few

    def write(self, path: str, timeout: float | None, metadata: Pairs) -> tuple[bytes, int]:
        """The block of a call, and what it counts for in memory (RFC 9113, 6.5.2).

        ``timeout`` is in seconds. ValueError for metadata that gRPC does not allow.
        """
        start, size = self._starts.get(path) or self._start(path)
        pairs: list[tuple[str, str | bytes, bool]] = []
        if timeout is not None:
            pairs.append(("grpc-timeout", timeout_text(timeout), True))
        pairs += [encoded(name, value) for name, value in metadata]
        if not pairs:
            return start, size
        size += sum(len(name) + len(value) + FIELD for name, value, _ in pairs)
        return start + self._encoder.encode(pairs, huffman=False), size

    def _start(self, path: str) -> tuple[bytes, int]:
        pairs = [
            (":method", "POST", True),
            (":scheme", self._scheme, True),
            (":path", path, True),
            (":authority", self._authority, True),
            ("te", "trailers", True),
            ("content-type", "application/grpc", True),
            ("user-agent", "npufleet", True),
            ("grpc-accept-encoding", "identity", True),
        ]
        size = sum(len(name) + len(value) + FIELD for name, value, _ in pairs)
        made = self._starts[path] = (self._encoder.encode(pairs, huffman=False), size)
        return made


def allowed_name(name: str) -> bool:
    """Whether gRPC allows ``name`` as a key of metadata, beside the names that it keeps for itself."""
    return bool(name) and _NAME.issuperset(name) and not name.startswith("grpc-timeout")


def allowed_value(raw: bytes) -> bool:
    """Whether gRPC allows ``raw`` as the value of a key that does not end in -bin."""
    return raw.isascii() and raw.decode().isprintable()


def encoded(name: str, value: str | bytes) -> tuple[str, str | bytes, bool]:
    """One pair of metadata as HPACK takes it, never to be indexed. ValueError for what gRPC does not allow."""
    if not allowed_name(name):
        raise ValueError(f"metadata key {name!r}: gRPC allows lower case letters, digits and '-_.'")
    if name.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return name, b64encode(raw).rstrip(b"="), True
    raw = value if isinstance(value, bytes) else value.encode("latin-1", errors="replace")
    if not allowed_value(raw):
        raise ValueError(f"metadata {name!r}: gRPC allows printable ASCII only, or a key that ends in -bin")
    return name, raw, True


def timeout_text(seconds: float) -> str:
    """``seconds`` as ``grpc-timeout`` writes it: at most eight digits, never longer than a finer unit needs."""
    for unit, factor in (("u", 1e6), ("m", 1e3), ("S", 1.0), ("M", 1 / 60)):
        number = math.ceil(seconds * factor)
        if number < 100_000_000:
            return f"{max(0, number)}{unit}"
    return f"{min(math.ceil(seconds / 3600), 99_999_999)}H"
