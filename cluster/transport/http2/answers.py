"""The header blocks of gRPC answers, as HPACK literals that are never indexed (RFC 7541, gRPC over HTTP/2)."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

import grpc
from hpack import Encoder

from npufleet.cluster.transport.base import Pairs
from npufleet.cluster.transport.http2.headers import encoded

_START = ((":status", "200", True), ("content-type", "application/grpc", True))
_PLAIN = "".join(chr(at) for at in range(0x20, 0x7F) if chr(at) != "%")


@lru_cache(maxsize=256)
def headers(metadata: Pairs = ()) -> bytes:
    """What an answer begins with. ValueError for metadata that gRPC does not allow."""
    return _encode([*_START, *(encoded(name, value) for name, value in metadata)])


@lru_cache(maxsize=256)
def trailers(code: grpc.StatusCode, details: str, metadata: Pairs, *, alone: bool) -> bytes:
    """What an answer ends with; ``alone``: nothing has been sent before."""
    pairs = list(_START) if alone else []
    pairs.append(("grpc-status", str(code.value[0]), True))
    if details:
        pairs.append(("grpc-message", quote(details, safe=_PLAIN), True))
    return _encode([*pairs, *(encoded(name, value) for name, value in metadata)])


def http_status(number: int) -> bytes:
    """What an answer that is not gRPC consists of."""
    return _encode([(":status", str(number), True), ("content-length", "0", True)])


def _encode(pairs: list[tuple[str, str | bytes, bool]]) -> bytes:
    block: bytes = Encoder().encode(pairs, huffman=False)
    return block
