"""Our end of one HTTP/2 connection of a client (RFC 9113), who is not trusted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.answers import http_status
from npufleet.cluster.transport.http2.frames import ProtocolError, StreamError
from npufleet.cluster.transport.http2.link import STREAM_WINDOW, Link
from npufleet.cluster.transport.http2.requests import Request, RequestReader, read
from npufleet.cluster.transport.http2.served import ServedCall

_Code = grpc.StatusCode


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Times are seconds, sizes are bytes."""

    max_message_bytes: int = 64 << 20  # of one message of a request
    max_metadata_bytes: int = 16 << 10
    max_calls: int = 8192  # of all connections, calls that a client has left but that have not ended included
    keepalive_time: float = 30.0  # a ping goes out after this much silence
    keepalive_timeout: float = 10.0  # and the client counts as gone when nothing comes back within this


class Owner(Protocol):
    """The server that a connection belongs to."""

    def on_connected(self, connection: ServerConnection) -> None:
        """It is there."""

    def on_call(self, call: ServedCall) -> None:
        """The headers of a call came. Its handler decides what comes of it."""

    def knows(self, request: Request) -> bool:
        """True where the path of ``request`` is a method; notes then whether it takes many messages."""

    def on_lost(self, connection: ServerConnection) -> None:
        """It is gone, and its calls with it."""


class ServerConnection(Link[ServedCall]):
    """Calls in, answers out. Belongs to one event loop."""

    draining: bool
    _rest: bytes

    def __init__(self, owner: Owner, limits: ServerLimits, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, limits.keepalive_time, limits.keepalive_timeout)
        self.limits = limits
        self.loop = loop
        self.peer = ""
        self._owner = owner
        self._reader = RequestReader()
        self._greeted = False  # the client's preface came
        self._last_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client."""
        self.peer = _name(transport.get_extra_info("peername"))
        super().connection_made(transport)
        self._owner.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """As in the base, behind the preface."""
        if not self._greeted:
            data, self._rest = self._rest + data, b""
            size = len(frames.PREFACE)
            if not frames.PREFACE.startswith(data[:size]):
                self.abort(frames.PROTOCOL_ERROR, "this port speaks HTTP/2 with prior knowledge")
                return
            if len(data) < size:
                self._rest = data
                return
            self._greeted, data = True, data[size:]
        super().data_received(data)

    def drain(self) -> None:
        """Take no more calls; end when those that run have."""
        if not self.draining and not self.closed:
            self.draining, self.reason = True, "the server stops"
            self.sender.write(frames.goaway(self._last_id, frames.NO_ERROR, self.reason))
            self._close_if_idle()

    def done(self, call: ServedCall) -> None:
        """The answer to ``call`` is out."""
        if self._streams.pop(call.stream_id, None) is not None:
            if not call.whole:  # what the client still sends of it is of no use
                self.sender.write(frames.reset(call.stream_id, frames.NO_ERROR))
            self._left(call)

    # frames

    def _opening(self) -> bytes:
        own = {
            frames.MAX_CONCURRENT_STREAMS: self.limits.max_calls,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: self.limits.max_metadata_bytes,
        }
        return frames.settings(own)

    def _find(self, stream_id: int) -> ServedCall | None:
        """As in the base: streams are the client's to open."""
        call = self._streams.get(stream_id)
        if call is None and (not stream_id & 1 or stream_id > self._last_id):
            raise ProtocolError(frames.PROTOCOL_ERROR, f"stream {stream_id} was never opened")
        return call

    def _expect_headers(self, stream_id: int) -> None:
        if not stream_id & 1:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"stream {stream_id} is not the client's to open")

    def _end_block(self, stream_id: int, flags: int, block: bytes) -> None:
        if self.sender.full:
            raise ProtocolError(
                frames.ENHANCE_YOUR_CALM, "it begins calls and does not read what comes of them"
            )
        pairs = self._reader.pairs(block)  # first: HPACK's state goes on whatever comes of the call
        ends = bool(flags & frames.END_STREAM)
        if stream_id <= self._last_id:
            if (call := self._streams.get(stream_id)) is None:
                return  # it has ended meanwhile
            if not ends or call.whole:
                self._break(call, StreamError(frames.PROTOCOL_ERROR, "headers in the middle of a request"))
            else:
                call.on_end()
            return
        self._last_id = stream_id
        if self.draining:
            self.sender.write(frames.reset(stream_id, frames.REFUSED_STREAM))
            return
        try:
            request = read(pairs)
        except StreamError as error:
            self.sender.write(frames.reset(stream_id, error.code))
            return
        self._begin(stream_id, request, ends=ends)

    def _begin(self, stream_id: int, request: Request, *, ends: bool) -> None:
        if request.refused:
            block = http_status(request.refused)
            answer = frames.headers(stream_id, block, largest=self.sender.largest_frame, ends=True)
            self.sender.write(answer if ends else answer + frames.reset(stream_id, frames.NO_ERROR))
            return
        known = self._owner.knows(request)
        call = ServedCall(stream_id, self, request)
        call.receive_window = STREAM_WINDOW
        self._streams[stream_id] = call
        call.whole = ends
        limit = self.limits.max_metadata_bytes
        if request.size > limit:
            call.finish(_Code.RESOURCE_EXHAUSTED, f"metadata of {request.size} bytes; the limit is {limit}")
        elif not known:
            call.finish(_Code.UNIMPLEMENTED, f"there is no method {request.path[:200]!r}")
        else:
            self._owner.on_call(call)
            if ends:
                call.on_end()

    def _ended(self, stream: ServedCall) -> None:
        stream.on_end()

    def _was_reset(self, stream: ServedCall, error: int) -> None:
        stream.on_gone()

    def _break(self, stream: ServedCall, error: StreamError) -> None:
        self.reset(stream, error.code)
        stream.on_gone()

    def _on_peer_settings(self, *, first: bool) -> None:
        """Nothing more: the client opens streams when it likes."""

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        self.draining, self.reason = True, "the client closed the connection"
        self._close_if_idle()

    def _end(self) -> None:
        if not self._stop():
            return
        streams = list(self._streams.values())
        self._streams.clear()
        for call in streams:
            call.on_gone()
        self._owner.on_lost(self)


def _name(address: object) -> str:
    """A peer as grpcio names it."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return "unix:"
