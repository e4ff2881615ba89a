"""HTTP/2 frames as bytes (RFC 9113): the numbers, and what we write."""

from __future__ import annotations

from struct import Struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

END_STREAM = 0x1  # of DATA and HEADERS
ACK = 0x1  # of SETTINGS and PING
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x4, 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 0x9, 0xB, 0xC

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 0x1, 0x2, 0x3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 0x4, 0x5, 0x6

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
LARGEST_WINDOW = 2**31 - 1
LARGEST_FRAME = 2**24 - 1
STREAM_MASK = 0x7FFF_FFFF

HEAD = Struct(">IBI")  # length (24 bits) and type (8 bits) in one number, flags, stream id
SETTING = Struct(">HI")
NUMBER = Struct(">I")
TWO_NUMBERS = Struct(">II")


class ProtocolError(Exception):
    """The peer broke the protocol: the connection ends with HTTP/2 error ``code``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamError(Exception):
    """The peer broke the protocol on one stream: that stream ends with HTTP/2 error ``code``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, NUMBER.pack(increment))


def reset(stream_id: int, code: int) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, NUMBER.pack(code))


def goaway(last_stream_id: int, code: int, text: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, TWO_NUMBERS.pack(last_stream_id, code) + text.encode()[:256])


def headers(stream_id: int, block: bytes, *, largest: int, ends: bool = False) -> bytes:
    """HEADERS, which end the stream if asked to, and CONTINUATION frames for what exceeds ``largest`` bytes."""
    first = END_STREAM if ends else 0
    if len(block) <= largest:
        return frame(HEADERS, END_HEADERS | first, stream_id, block)
    pieces = [block[at : at + largest] for at in range(0, len(block), largest)]
    made = [frame(HEADERS, first, stream_id, pieces[0])]
    made += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    made.append(frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1]))
    return b"".join(made)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a DATA or HEADERS payload without its padding; ProtocolError where it cannot be."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL_ERROR, "padding as long as its frame")
    return payload[1 : len(payload) - payload[0]]
