"""Our end of one HTTP/2 connection to an engine (RFC 9113)."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc

from npufleet.cluster.transport.base import LinkSettings
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.call import Http2Call
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError
from npufleet.cluster.transport.http2.headers import HeaderReader, HeaderTooLarge
from npufleet.cluster.transport.http2.link import STREAM_WINDOW, Link

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


class Connection(Link[Http2Call]):
    """Calls out, answers in. Belongs to one event loop; after its end all methods do nothing."""

    def __init__(self, owner: Owner, settings: LinkSettings, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, settings.keepalive_time, settings.keepalive_timeout)
        self.opened = asyncio.Event()  # the peer's settings came, or it is over
        self._owner = owner
        self._settings = settings
        self._next_id = 1
        self._reader = HeaderReader(settings.max_metadata_bytes)

    # for the channel and its calls

    @property
    def room(self) -> int:
        """How many more calls may start now."""
        if not self.ready or self.draining or self.closed or self._next_id > frames.STREAM_MASK:
            return 0
        return self.sender.most_streams - len(self._streams)

    @property
    def calls(self) -> int:
        """How many calls run."""
        return len(self._streams)

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
        self._streams[call.stream_id] = call
        self.sender.start(call, call.block)
        if self._next_id > frames.STREAM_MASK:  # no stream id is left: as good as told to go away
            self.draining = True
            self._owner.on_draining(self)

    def cancel_calls(self) -> None:
        """Cancel all that runs."""
        for call in tuple(self._streams.values()):
            call.cancel()

    # frames

    def _opening(self) -> bytes:
        own = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: self._settings.max_metadata_bytes,
        }
        return frames.PREFACE + frames.settings(own)

    def _find(self, stream_id: int) -> Http2Call | None:
        """As in the base: streams are ours to open."""
        call = self._streams.get(stream_id)
        if call is None and (not stream_id & 1 or stream_id >= self._next_id):
            raise ProtocolError(frames.PROTOCOL_ERROR, f"stream {stream_id} was never opened")
        return call

    def _end_block(self, stream_id: int, flags: int, block: bytes) -> None:
        call = self._find(stream_id)
        ends = bool(flags & frames.END_STREAM)
        try:
            headers = self._reader.read(block)
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

    def _ended(self, stream: Http2Call) -> None:
        self._close_stream(stream)
        stream.finish(_Code.UNKNOWN, "the answer ended without a gRPC status")

    def _was_reset(self, stream: Http2Call, error: int) -> None:
        if error == frames.REFUSED_STREAM and not stream.answered:
            self._owner.on_unheard([stream])
        else:
            stream.on_reset(error)

    def _on_peer_settings(self, *, first: bool) -> None:
        if first:
            self.opened.set()
            self._owner.on_ready(self)
        else:
            self._owner.on_room(self)

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "GOAWAY of no use")
        last, error = frames.TWO_NUMBERS.unpack_from(payload)
        text = payload[8:200].decode("latin-1")
        self.reason = f"the peer closed the connection (HTTP/2 error {error}) {text}".rstrip()
        unheard = [call for number, call in self._streams.items() if number > last & frames.STREAM_MASK]
        for call in unheard:
            del self._streams[call.stream_id]
            self.sender.forget(call)
        self.draining = True
        self._owner.on_draining(self)
        self._owner.on_unheard(unheard)
        self._close_if_idle()

    # ends

    def _break(self, stream: Http2Call, error: StreamError) -> None:
        self.reset(stream, error.code)
        stream.finish(_Code.INTERNAL, f"the peer broke HTTP/2: {error}")

    def _close_stream(self, call: Http2Call) -> None:
        """The peer's side of a stream has ended; what we had not sent of the request is of no use any more."""
        del self._streams[call.stream_id]
        if call.unsent:
            self.sender.write(frames.reset(call.stream_id, frames.NO_ERROR))
        self._left(call)

    def _left(self, stream: Http2Call) -> None:
        super()._left(stream)
        if not self.closed:
            self._owner.on_room(self)

    def _end(self) -> None:
        if not self._stop():
            return
        self.opened.set()
        for call in tuple(self._streams.values()):
            call.finish(_Code.UNAVAILABLE, self.reason)
        self._owner.on_lost(self, self.reason)
