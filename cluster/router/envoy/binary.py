"""Binary gRPC metadata as it stands in HTTP headers."""

from __future__ import annotations

import base64
import binascii


def from_base64(value: str) -> bytes:
    """The bytes of a ``-bin`` header, with or without padding; ValueError where it is not base64.

    Several values in one header are joined by commas; the first counts (gRPC over HTTP/2, "Binary-Header").
    """
    first = value.split(",", 1)[0].strip().encode()
    try:
        return base64.b64decode(first + b"=" * (-len(first) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a binary header is not base64: {error}") from error
