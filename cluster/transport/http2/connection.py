"""One HTTP/2 connection to an engine (RFC 9113), as an asyncio protocol.

All frames of one read are handled in one pass; what they make us write goes out in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import grpc

from npufleet.cluster.transport.base import LinkSettings
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.call import Http2Call
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError
from npufleet.cluster.transport.http2.headers import HeaderReader, HeaderTooLarge
from npufleet.cluster.transport.http2.life import Life
from npufleet.cluster.transport.http2.sending import Sender

CONNECTION_WINDOW = 16 << 20  # what all streams together may have on the way to us
STREAM_WINDOW = 256 << 10
_MOST_BLOCK = 1 << 20  # a header block this long is an attack or a defect
_Code = grpc.StatusCode


class Owner(Protocol):
    """The channel that a connection belongs to."""

    def on_ready(self, connection: Connection) -> None:
        """The peer's settings came: calls may start."""

    def on_room(self, connection: Connection) -> None:
        """One more call may start."""

    def on_draining(self, connection: Connection) -> None:
        """It takes no new calls and ends when it has none."""

    def on_unheard(self, calls: list[Http2Call]) -> None:
        """``calls`` were sent, but the peer has not looked at them and will not."""

    def on_lost(self, connection: Connection, reason: str) -> None:
        """It is gone; its calls have been ended."""


class Connection(asyncio.Protocol):
    """Frames in and out. Belongs to one event loop; after its end all methods do nothing."""

    def __init__(self, owner: Owner, settings: LinkSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.sender = Sender(loop)
        self.opened = asyncio.Event()  # the peer's settings came, or it is over
        self.ready = self.draining = self.closed = False
        self._owner = owner
        self._settings = settings
        self._loop = loop
        self._calls: dict[int, Http2Call] = {}
        self._next_id = 1
        self._reader = HeaderReader(settings.max_metadata_bytes)
        self._rest = b""
        self._window = CONNECTION_WINDOW
        self._to_return = 0
        self._block: tuple[int, int, bytearray] | None = None  # stream id, flags, HEADERS so far
        self._life: Life | None = None
        self.reason = "the connection was closed"  # why it ended, once it has
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

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what opens an HTTP/2 connection."""
        own = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: self._settings.max_metadata_bytes,
        }
        self.sender.open(cast(asyncio.Transport, transport))  # uvloop's is no subclass of it
        self.sender.write(frames.PREFACE + frames.settings(own))
        self.sender.write(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))
        settings = self._settings
        self._life = Life(
            self._loop, settings.keepalive_time, settings.keepalive_timeout, self._ping, self._lifeless
        )

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
        except ProtocolError as error:
            self.abort(error.code, f"the peer broke HTTP/2: {error}")
            return
        self._rest = buffer[at:] if at < end else b""

    # for the channel and its calls

    @property
    def room(self) -> int:
        """How many more calls may start now."""
        if not self.ready or self.draining or self.closed or self._next_id > frames.STREAM_MASK:
            return 0
        return self.sender.most_streams - len(self._calls)

    @property
    def calls(self) -> int:
        """How many calls run."""
        return len(self._calls)

    def start(self, call: Http2Call) -> None:
        """Send ``call``."""
        assert self.room > 0, "the channel asks before it starts a call"
        if call.headers_size > self.sender.most_headers:
            text = f"metadata of {call.headers_size} bytes; the peer takes {self.sender.most_headers}"
            call.finish(_Code.RESOURCE_EXHAUSTED, text)
            return
        call.stream_id, call.connection = self._next_id, self
        call.receive_window, call.to_return = STREAM_WINDOW, 0
        self._next_id += 2
        self._calls[call.stream_id] = call
        self.sender.start(call)
        if self._next_id > frames.STREAM_MASK:  # no stream id is left: as good as told to go away
            self.draining = True
            self._owner.on_draining(self)

    def cancel_calls(self) -> None:
        """Cancel all that runs."""
        for call in tuple(self._calls.values()):
            call.cancel()

    def reset(self, call: Http2Call, error: int) -> None:
        """Tell the peer that ``call`` is of no more interest."""
        if self._calls.pop(call.stream_id, None) is not None and not self.closed:
            self.sender.forget(call)
            self.sender.write(frames.reset(call.stream_id, error))
            self._left(call)

    def consumed(self, call: Http2Call, size: int) -> None:
        """The reader of ``call`` took ``size`` bytes: the peer may send as many again."""
        call.to_return += size
        if call.to_return >= STREAM_WINDOW // 2 and call.stream_id in self._calls and not self.closed:
            self.sender.write(frames.window_update(call.stream_id, call.to_return))
            call.receive_window += call.to_return
            call.to_return = 0

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

    def _find(self, stream_id: int) -> Http2Call | None:
        """The call of a stream; None where it has ended. ProtocolError where it never began."""
        call = self._calls.get(stream_id)
        if call is None and (not stream_id & 1 or stream_id >= self._next_id):
            raise ProtocolError(frames.PROTOCOL_ERROR, f"stream {stream_id} was never opened")
        return call

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
        call = self._find(stream_id)
        if call is None:
            return
        call.receive_window -= size
        content = frames.unpadded(flags, payload) if flags & frames.PADDED else payload
        try:
            if call.receive_window < 0:
                raise StreamError(frames.FLOW_CONTROL_ERROR, "more data than the stream's window")
            if len(content) < size:
                self.consumed(call, size - len(content))
            if content:
                call.on_data(content)
        except StreamError as error:
            self._break(call, error)
            return
        if flags & frames.END_STREAM:
            self._close_stream(call)
            call.finish(_Code.UNKNOWN, "the answer ended without a gRPC status")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._find(stream_id)
        content = frames.unpadded(flags, payload)
        if flags & frames.PRIORITIZED:
            if len(content) < 5:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            content = content[5:]
        self._block = (stream_id, flags, bytearray(content))
        if flags & frames.END_HEADERS:
            self._end_block()

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ProtocolError(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        if not payload and not flags & frames.END_HEADERS:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "an empty CONTINUATION")
        self._block[2].extend(payload)
        if len(self._block[2]) > _MOST_BLOCK:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, f"a header block above {_MOST_BLOCK} bytes")
        if flags & frames.END_HEADERS:
            self._end_block()

    def _end_block(self) -> None:
        assert self._block is not None
        stream_id, flags, block = self._block
        self._block = None
        call = self._find(stream_id)
        ends = bool(flags & frames.END_STREAM)
        try:
            headers = self._reader.read(bytes(block))
        except HeaderTooLarge:
            if call is not None:
                limit = self._settings.max_metadata_bytes
                self.reset(call, frames.CANCEL)
                call.finish(_Code.RESOURCE_EXHAUSTED, f"the peer's metadata is above {limit} bytes")
            return
        if call is None:
            return
        try:
            if ends:
                self._close_stream(call)
            call.on_headers(headers, ends=ends)
        except StreamError as error:
            self._break(call, error)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "RST_STREAM is 4 bytes long")
        call = self._find(stream_id)
        if call is None:
            return
        (error,) = frames.NUMBER.unpack(payload)
        del self._calls[stream_id]
        if error == frames.REFUSED_STREAM and not call.answered:
            self._owner.on_unheard([call])
        else:
            call.on_reset(error)
        self._left(call)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "SETTINGS of no use")
        if flags & frames.ACK:
            if not self.ready:
                raise ProtocolError(frames.PROTOCOL_ERROR, "its first SETTINGS is an acknowledgement")
            return
        for key, value in frames.SETTING.iter_unpack(payload):
            self.sender.apply(key, value, self._calls.values())
        self._acknowledge(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if self.ready:
            self._owner.on_room(self)
            return
        self.ready = True
        self.opened.set()
        self._owner.on_ready(self)

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

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "GOAWAY of no use")
        last, error = frames.TWO_NUMBERS.unpack_from(payload)
        text = payload[8:200].decode("latin-1")
        self.reason = f"the peer closed the connection (HTTP/2 error {error}) {text}".rstrip()
        unheard = [call for number, call in self._calls.items() if number > last & frames.STREAM_MASK]
        for call in unheard:
            del self._calls[call.stream_id]
            self.sender.forget(call)
        self.draining = True
        self._owner.on_draining(self)
        self._owner.on_unheard(unheard)
        self._close_if_idle()

    def _on_window(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "WINDOW_UPDATE is 4 bytes long")
        increment = frames.NUMBER.unpack(payload)[0] & frames.STREAM_MASK
        if not stream_id:
            self.sender.widen(increment)
        elif (call := self._find(stream_id)) is not None:
            try:
                self.sender.widen_stream(call, increment)
            except StreamError as error:
                self._break(call, error)

    # ends

    def _ping(self) -> None:
        self.sender.write(frames.frame(frames.PING, 0, 0, b"npufleet"))

    def _lifeless(self, reason: str) -> None:
        self.abort(frames.NO_ERROR, reason)

    def _break(self, call: Http2Call, error: StreamError) -> None:
        self.reset(call, error.code)
        call.finish(_Code.INTERNAL, f"the peer broke HTTP/2: {error}")

    def _close_stream(self, call: Http2Call) -> None:
        """The peer's side of a stream has ended; what we had not sent of the request is of no use any more."""
        del self._calls[call.stream_id]
        if call.unsent:
            self.sender.write(frames.reset(call.stream_id, frames.NO_ERROR))
        self._left(call)

    def _left(self, call: Http2Call) -> None:
        self.sender.forget(call)
        self._close_if_idle()
        if not self.closed:
            self._owner.on_room(self)

    def _close_if_idle(self) -> None:
        if self.draining and not self._calls and not self.closed:
            self.abort(frames.NO_ERROR, self.reason)

    def _end(self) -> None:
        """Tell everybody, once, that it is over."""
        if self.closed:
            return
        self.closed = True
        self.opened.set()
        if self._life is not None:
            self._life.stop()
        self.sender.close()
        for call in tuple(self._calls.values()):
            call.finish(_Code.UNAVAILABLE, self.reason)
        self._owner.on_lost(self, self.reason)
