"""What one connection still has to write: frames of this turn of the loop, and bodies that wait for a window."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError

_MOST_UNWRITTEN = 8 << 20  # bytes that a peer may leave unread while it still asks for more


class Sending(Protocol):
    """A stream with something to send."""

    stream_id: int
    send_window: int  # bytes that the peer takes of it beyond what it takes of each stream that begins
    unsent: memoryview
    closes: bool  # the end of what it has to send is the end of our side of the stream

    def on_sent(self) -> None:
        """Nothing is left to send."""


class Sender:
    """Gathers frames and writes them once per turn; sends bodies as far as the peer's windows allow, in turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.most_streams = 100  # calls that the peer lets run at once; a guess until it says so
        self.most_headers = 1 << 62  # bytes of headers that it takes
        self.largest_frame = frames.DEFAULT_FRAME
        self.paused = False  # the socket is full
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes | memoryview] = []
        self._scheduled = False
        self._window = frames.DEFAULT_WINDOW
        self._initial_window = frames.DEFAULT_WINDOW
        self.moved = False  # the peer changed the windows of all its streams: settle() is due
        # What a peer may ask for in a few bytes must not cost a look at each of its streams, which may be thousands: so
        # windows are kept relative to the initial one, and bodies whose own window is used up apart.
        self._bodies: OrderedDict[int, Sending] = OrderedDict()  # calls with something left to send
        self._held: dict[int, Sending] = {}  # those of them whose stream has no window

    def open(self, transport: asyncio.Transport) -> None:
        """Begin to write to ``transport``."""
        self._transport = transport

    @property
    def full(self) -> bool:
        """True where the peer has left much unread."""
        return self._transport is not None and self._transport.get_write_buffer_size() > _MOST_UNWRITTEN

    def write(self, data: bytes) -> None:
        """Write ``data`` at the end of this turn of the loop."""
        self._out.append(data)
        self._schedule()

    def start(self, call: Sending, block: bytes) -> None:
        """Send ``block``, the headers of ``call``, and of its body what the windows allow."""
        call.send_window = 0
        self.write(frames.headers(call.stream_id, block, largest=self.largest_frame))
        self.send(call)

    def send(self, call: Sending) -> None:
        """Send of ``call`` what the windows allow, the rest when they do."""
        self._held.pop(call.stream_id, None)
        self._bodies[call.stream_id] = call
        while self._send_frame(call):
            pass

    def at_once(self, call: Sending, data: bytes) -> bool:
        """Send ``data`` of ``call``, which has nothing waiting, in one frame; False where it does not fit."""
        size = len(data)
        room = self._initial_window + call.send_window
        if self.paused or size > self._window or size > room or size > self.largest_frame:
            return False
        self._window -= size
        call.send_window -= size
        self._out.append(frames.HEAD.pack(size << 8, 0, call.stream_id))  # the type of DATA is 0
        self._out.append(data)
        if not self._scheduled:
            self._schedule()
        return True

    def forget(self, call: Sending) -> None:
        """Send no more of ``call``."""
        self._bodies.pop(call.stream_id, None)
        self._held.pop(call.stream_id, None)

    def apply(self, key: int, value: int) -> None:
        """The peer set one of its SETTINGS. ProtocolError for a value it may not have."""
        if key == frames.MAX_CONCURRENT_STREAMS:
            self.most_streams = value
        elif key == frames.MAX_HEADER_LIST_SIZE:
            self.most_headers = value
        elif key == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME <= value <= frames.LARGEST_FRAME:
                raise ProtocolError(frames.PROTOCOL_ERROR, f"a largest frame of {value}")
            self.largest_frame = value
        elif key == frames.INITIAL_WINDOW_SIZE:
            if value > frames.LARGEST_WINDOW:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, f"an initial window of {value}")
            self.moved |= value != self._initial_window
            self._initial_window = value  # running streams move with it (RFC 9113, 6.9.2)

    def settle(self, calls: Iterable[Sending]) -> None:
        """The peer has moved the windows of ``calls``, which are all that run. ProtocolError for one too large."""
        self.moved = False
        widest = frames.LARGEST_WINDOW - self._initial_window
        if any(call.send_window > widest for call in calls):
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, "a stream's window above its limit")
        self._bodies.update(self._held)
        self._held.clear()
        self.pump()

    def widen(self, increment: int) -> None:
        """The peer takes ``increment`` bytes more on the connection."""
        self._window += increment
        if not increment:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a window update of 0")
        if self._window > frames.LARGEST_WINDOW:
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, f"a window update of {increment}")
        self.pump()

    def widen_stream(self, call: Sending, increment: int) -> None:
        """The peer takes ``increment`` bytes more of ``call``."""
        call.send_window += increment
        if not increment:
            raise StreamError(frames.PROTOCOL_ERROR, "a window update of 0")
        if self._initial_window + call.send_window > frames.LARGEST_WINDOW:
            raise StreamError(frames.FLOW_CONTROL_ERROR, f"a window update of {increment}")
        if (waiting := self._held.pop(call.stream_id, None)) is not None:
            self._bodies[call.stream_id] = waiting
            self.pump()

    def pump(self) -> None:
        """Send of each waiting body a frame in turn, until windows or socket are full."""
        while self._bodies and self._window > 0 and not self.paused:
            number, call = next(iter(self._bodies.items()))
            self._bodies.move_to_end(number)
            self._send_frame(call)

    def close(self, last: bytes = b"") -> None:
        """Write what there is and ``last``, then close the transport."""
        transport, self._transport = self._transport, None
        self._bodies.clear()
        self._held.clear()
        if transport is None:
            return
        if not transport.is_closing():
            transport.write(b"".join((*self._out, last)))
            # A peer that does not read must not keep the connection open.
            transport.abort() if self.paused else transport.close()
        self._out.clear()

    def _send_frame(self, call: Sending) -> bool:
        """Send one frame of the body of ``call``; False where no more of it may go now."""
        room = self._initial_window + call.send_window
        size = min(len(call.unsent), self._window, room, self.largest_frame)
        if size <= 0 or self.paused:
            if not call.unsent or room <= 0:
                self._bodies.pop(call.stream_id, None)
            if call.unsent and room <= 0:
                self._held[call.stream_id] = call
            return False
        piece, call.unsent = call.unsent[:size], call.unsent[size:]
        self._window -= size
        call.send_window -= size
        flags = frames.END_STREAM if call.closes and not call.unsent else 0
        self._out.append(frames.HEAD.pack(size << 8 | frames.DATA, flags, call.stream_id))
        self._out.append(piece)
        self._schedule()
        if not call.unsent:
            self._bodies.pop(call.stream_id, None)
            call.on_sent()
        return bool(call.unsent)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._transport is None or not self._out:
            return
        out, self._out = self._out, []
        self._transport.write(b"".join(out))
