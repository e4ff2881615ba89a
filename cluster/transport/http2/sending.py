"""What one connection still has to write: frames of this turn of the loop, and bodies that wait for a window."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError

_MOST_UNWRITTEN = 8 << 20  # bytes that a peer may leave unread while it still asks for more


class Sending(Protocol):
    """A stream with something to send."""

    stream_id: int
    send_window: int
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
        self._bodies: dict[int, Sending] = {}  # calls with something left to send

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

    @property
    def initial_window(self) -> int:
        """What the peer takes of a stream that begins."""
        return self._initial_window

    def start(self, call: Sending, block: bytes) -> None:
        """Send ``block``, the headers of ``call``, and of its body what the windows allow."""
        call.send_window = self._initial_window
        self.write(frames.headers(call.stream_id, block, largest=self.largest_frame))
        self.send(call)

    def send(self, call: Sending) -> None:
        """Send of ``call`` what the windows allow, the rest when they do."""
        self._bodies[call.stream_id] = call
        self._send_some(call, everything=True)

    def at_once(self, call: Sending, data: bytes) -> bool:
        """Send ``data`` of ``call``, which has nothing waiting, in one frame; False where it does not fit."""
        size = len(data)
        if self.paused or size > self._window or size > call.send_window or size > self.largest_frame:
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

    def apply(self, key: int, value: int, calls: Iterable[Sending]) -> None:
        """The peer set one of its SETTINGS while ``calls`` run. ProtocolError for a value it may not have."""
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
            self._set_initial_window(value, calls)

    def _set_initial_window(self, size: int, calls: Iterable[Sending]) -> None:
        """Running streams move with it (RFC 9113, 6.9.2)."""
        change, self._initial_window = size - self._initial_window, size
        for call in calls:
            call.send_window += change
            if call.send_window > frames.LARGEST_WINDOW:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, "a stream's window above its limit")
        self.pump()

    def widen(self, increment: int) -> None:
        """The peer takes ``increment`` bytes more on the connection."""
        self._window += increment
        if not increment or self._window > frames.LARGEST_WINDOW:
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, f"a window update of {increment}")
        self.pump()

    def widen_stream(self, call: Sending, increment: int) -> None:
        """The peer takes ``increment`` bytes more of ``call``."""
        call.send_window += increment
        if not increment or call.send_window > frames.LARGEST_WINDOW:
            raise StreamError(frames.FLOW_CONTROL_ERROR, f"a window update of {increment}")
        self.pump()

    def pump(self) -> None:
        """Send of each waiting body a frame in turn, until windows or socket are full."""
        moved = True
        while moved and self._bodies and self._window > 0 and not self.paused:
            moved = False
            for call in list(self._bodies.values()):
                moved |= self._send_some(call, everything=False)

    def close(self, last: bytes = b"") -> None:
        """Write what there is and ``last``, then close the transport."""
        transport, self._transport = self._transport, None
        self._bodies.clear()
        if transport is None:
            return
        if not transport.is_closing():
            transport.write(b"".join((*self._out, last)))
            # A peer that does not read must not keep the connection open.
            transport.abort() if self.paused else transport.close()
        self._out.clear()

    def _send_some(self, call: Sending, *, everything: bool) -> bool:
        """Send one frame of the body of ``call``, or all that may be sent; False where nothing may."""
        sent = False
        while call.unsent and not self.paused:
            size = min(len(call.unsent), self._window, call.send_window, self.largest_frame)
            if size <= 0:
                return sent
            piece, call.unsent = call.unsent[:size], call.unsent[size:]
            self._window -= size
            call.send_window -= size
            flags = frames.END_STREAM if call.closes and not call.unsent else 0
            self._out.append(frames.HEAD.pack(size << 8 | frames.DATA, flags, call.stream_id))
            self._out.append(piece)
            self._schedule()
            sent = True
            if not call.unsent:
                self._bodies.pop(call.stream_id, None)
                call.on_sent()
            if not everything:
                if call.unsent:  # behind the others
                    self._bodies[call.stream_id] = self._bodies.pop(call.stream_id)
                break
        return sent

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
