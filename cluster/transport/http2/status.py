"""From HTTP/2 and HTTP to gRPC's status codes (gRPC over HTTP/2, "Errors"; "HTTP to gRPC Status Code Mapping")."""

from __future__ import annotations

import grpc

from npufleet.cluster.transport.http2 import frames

Code = grpc.StatusCode

BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_RESETS = {
    frames.REFUSED_STREAM: Code.UNAVAILABLE,
    frames.CANCEL: Code.CANCELLED,
    frames.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    frames.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
_HTTP = {
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}


def of_reset(error: int) -> grpc.StatusCode:
    """The status of a stream that the peer reset with HTTP/2 ``error``."""
    return _RESETS.get(error, Code.INTERNAL)


def of_http(status: int) -> grpc.StatusCode:
    """The status of an answer that is HTTP ``status`` and not gRPC."""
    return _HTTP.get(status, Code.UNKNOWN)
