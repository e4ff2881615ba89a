"""What both ends of an HTTP/2 connection do alike (RFC 9113), as an asyncio protocol.

All frames of one read are handled in one pass; what they make us write goes out in one write.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError
from npufleet.cluster.transport.http2.life import Life
from npufleet.cluster.transport.http2.sending import Sender, Sending

CONNECTION_WINDOW = 16 << 20  # what all streams together may have on the way to us
STREAM_WINDOW = 256 << 10
_MOST_BLOCK = 1 << 20  # a header block this long is an attack or a defect


class Stream(Sending, Protocol):
    """What a connection asks of each of its streams."""

    receive_window: int
    to_return: int  # bytes whose window has not been given back yet

    def on_data(self, payload: bytes) -> None:
        """A piece of what the peer sends. Raises StreamError."""


S = TypeVar("S", bound=Stream)


class Link(asyncio.Protocol, Generic[S]):
    """Frames in and out. Belongs to one event loop; after its end all methods do nothing."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, keepalive_time: float, keepalive_timeout: float
    ) -> None:
        self.sender = Sender(loop)
        self.ready: bool = False  # the peer's settings came
        self.draining: bool = False  # no more streams begin
        self.closed: bool = False
        self.reason = "the connection was closed"  # why it ended, once it has
        self._loop = loop
        self._keepalive = (keepalive_time, keepalive_timeout)
        self._streams: dict[int, S] = {}
        self._rest: bytes = b""  # a frame that has not come as a whole
        self._window = CONNECTION_WINDOW
        self._to_return = 0
        self._block: tuple[int, int, bytearray] | None = None  # stream id, flags, HEADERS so far
        self._life: Life | None = None
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.HEADERS: self._on_headers,
            frames.CONTINUATION: self._on_continuation,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window,
        }

    # what the two ends do in their own ways

    @abstractmethod
    def _opening(self) -> bytes:
        """What we send first."""

    @abstractmethod
    def _find(self, stream_id: int) -> S | None:
        """The stream of that number; None where it has ended. ProtocolError where it never began."""

    @abstractmethod
    def _end_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """A whole header block came."""

    @abstractmethod
    def _ended(self, stream: S) -> None:
        """The peer's last DATA of a stream came."""

    @abstractmethod
    def _was_reset(self, stream: S, error: int) -> None:
        """The peer ended a stream, which is no longer among ours."""

    @abstractmethod
    def _break(self, stream: S, error: StreamError) -> None:
        """The peer broke HTTP/2 on one stream."""

    @abstractmethod
    def _on_peer_settings(self, *, first: bool) -> None:
        """The peer's settings were read."""

    @abstractmethod
    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """The peer wants no more streams."""

    @abstractmethod
    def _end(self) -> None:
        """Tell everybody, once, that it is over."""

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what opens an HTTP/2 connection."""
        self.sender.open(cast(asyncio.Transport, transport))  # uvloop's is no subclass of it
        self.sender.write(
            self._opening() + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )
        self._life = Life(self._loop, *self._keepalive, self._ping, self._lifeless)

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        if exc is not None:
            self.reason = f"the connection broke: {exc}"
        self._end()

    def eof_received(self) -> None:
        """The peer will send no more: the transport closes itself."""
        self.reason = "the peer closed the connection"

    def pause_writing(self) -> None:
        """The socket is full."""
        self.sender.paused = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self.sender.paused = False
        self.sender.pump()

    def data_received(self, data: bytes) -> None:
        """Handle every whole frame in what was read."""
        assert self._life is not None
        self._life.heard_at = self._loop.time()
        buffer = self._rest + data if self._rest else data
        at, end = 0, len(buffer)
        head = frames.HEAD.unpack_from
        try:
            while end - at >= 9 and not self.closed:
                packed, flags, stream_id = head(buffer, at)
                size = packed >> 8
                if size > frames.DEFAULT_FRAME:
                    raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                stop = at + 9 + size
                if stop > end:
                    break
                self._on_frame(packed & 0xFF, flags, stream_id & frames.STREAM_MASK, buffer[at + 9 : stop])
                at = stop
            if self.sender.moved:  # once for all that was read
                self.sender.settle(self._streams.values())
        except ProtocolError as error:
            self.abort(error.code, f"the peer broke HTTP/2: {error}")
            return
        self._rest = buffer[at:] if at < end else b""

    # for streams

    def reset(self, stream: S, error: int) -> None:
        """Tell the peer that ``stream`` is of no more interest."""
        if self._streams.pop(stream.stream_id, None) is not None and not self.closed:
            self.sender.forget(stream)
            self.sender.write(frames.reset(stream.stream_id, error))
            self._left(stream)

    def consumed(self, stream: S, size: int) -> None:
        """The reader of ``stream`` took ``size`` bytes: the peer may send as many again."""
        stream.to_return += size
        if stream.to_return >= STREAM_WINDOW // 2 and stream.stream_id in self._streams and not self.closed:
            self.sender.write(frames.window_update(stream.stream_id, stream.to_return))
            stream.receive_window += stream.to_return
            stream.to_return = 0

    def abort(self, error: int, reason: str) -> None:
        """Close it because of ``reason``, telling the peer HTTP/2 ``error``."""
        if self.closed:
            return
        self.reason = reason
        self.sender.close(frames.goaway(0, error, reason))
        self._end()

    # frames

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ProtocolError(frames.PROTOCOL_ERROR, "another frame within a header block")
        if not self.ready and kind != frames.SETTINGS:
            raise ProtocolError(frames.PROTOCOL_ERROR, "its first frame is not SETTINGS")
        if kind == frames.DATA:
            self._on_data(flags, stream_id, payload)
        elif (handler := self._handlers.get(kind)) is not None:
            handler(flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if self._window < 0:
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, "more data than the connection's window")
        self._to_return += size
        if self._to_return >= CONNECTION_WINDOW // 2:  # what waits to be read is bounded stream by stream
            self.sender.write(frames.window_update(0, self._to_return))
            self._window += self._to_return
            self._to_return = 0
        stream = self._find(stream_id)
        if stream is None:
            return
        stream.receive_window -= size
        content = frames.unpadded(flags, payload) if flags & frames.PADDED else payload
        try:
            if stream.receive_window < 0:
                raise StreamError(frames.FLOW_CONTROL_ERROR, "more data than the stream's window")
            if len(content) < size:
                self.consumed(stream, size - len(content))
            if content:
                stream.on_data(content)
        except StreamError as error:
            self._break(stream, error)
            return
        if flags & frames.END_STREAM:
            self._ended(stream)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._expect_headers(stream_id)
        content = frames.unpadded(flags, payload)
        if flags & frames.PRIORITIZED:
            if len(content) < 5:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            content = content[5:]
        self._block = (stream_id, flags, bytearray(content))
        if flags & frames.END_HEADERS:
            self._whole_block()

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ProtocolError(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        if not payload and not flags & frames.END_HEADERS:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "an empty CONTINUATION")
        self._block[2].extend(payload)
        if len(self._block[2]) > _MOST_BLOCK:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, f"a header block above {_MOST_BLOCK} bytes")
        if flags & frames.END_HEADERS:
            self._whole_block()

    def _whole_block(self) -> None:
        assert self._block is not None
        (stream_id, flags, block), self._block = self._block, None
        self._end_block(stream_id, flags, bytes(block))

    def _expect_headers(self, stream_id: int) -> None:
        """ProtocolError where a header block may not begin on that stream."""
        self._find(stream_id)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "RST_STREAM is 4 bytes long")
        stream = self._find(stream_id)
        if stream is None:
            return
        del self._streams[stream_id]
        self._left(stream)
        self._was_reset(
            stream, frames.NUMBER.unpack(payload)[0]
        )  # it may start over, as another stream of ours

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "SETTINGS of no use")
        if flags & frames.ACK:
            if not self.ready:
                raise ProtocolError(frames.PROTOCOL_ERROR, "its first SETTINGS is an acknowledgement")
            return
        for key, value in dict(frames.SETTING.iter_unpack(payload)).items():  # the last one of a key counts
            self.sender.apply(key, value)
        self._acknowledge(frames.frame(frames.SETTINGS, frames.ACK, 0))
        first, self.ready = not self.ready, True
        self._on_peer_settings(first=first)

    def _on_push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError(frames.PROTOCOL_ERROR, "a push, which was switched off")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "PING is 8 bytes long, on stream 0")
        if not flags & frames.ACK:
            self._acknowledge(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _acknowledge(self, answer: bytes) -> None:
        if self.sender.full:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "it asks for answers that it does not read")
        self.sender.write(answer)

    def _on_window(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "WINDOW_UPDATE is 4 bytes long")
        increment = frames.NUMBER.unpack(payload)[0] & frames.STREAM_MASK
        if not stream_id:
            self.sender.widen(increment)
        elif (stream := self._find(stream_id)) is not None:
            try:
                self.sender.widen_stream(stream, increment)
            except StreamError as error:
                self._break(stream, error)

    # ends

    def _ping(self) -> None:
        self.sender.write(frames.frame(frames.PING, 0, 0, b"npufleet"))

    def _lifeless(self, reason: str) -> None:
        self.abort(frames.NO_ERROR, reason)

    def _left(self, stream: S) -> None:
        """A stream is no longer among ours."""
        self.sender.forget(stream)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self.draining and not self._streams and not self.closed:
            self.abort(frames.NO_ERROR, self.reason)

    def _stop(self) -> bool:
        """Close the socket and stop watching; False where it had ended before."""
        if self.closed:
            return False
        self.closed = True
        if self._life is not None:
            self._life.stop()
        self.sender.close()
        return True
