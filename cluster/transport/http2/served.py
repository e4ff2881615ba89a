"""One call that came in: a ``grpc.aio.ServicerContext`` to its handler, a stream to its connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.answers import headers, trailers
from npufleet.cluster.transport.http2.requests import Request

if TYPE_CHECKING:
    from npufleet.cluster.transport.http2.serving import ServerConnection

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str | bytes], ...]
_PREFIX = 5  # of a gRPC message: one byte that says whether it is compressed, four of its length
_MOST_UNSENT = 64 << 10  # bytes that wait for the client before its handler waits too


class ServedCall:
    """Its connection calls ``on_*``; what a handler may call has the names of grpcio's context."""

    closes = False  # trailers end our side, not the last message

    def __init__(self, stream_id: int, connection: ServerConnection, request: Request) -> None:
        self.stream_id = stream_id
        self.request = request
        self.unsent = memoryview(b"")
        self.send_window = self.receive_window = self.to_return = 0
        self.whole = False  # the client has sent everything
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._limit = connection.limits.max_message_bytes
        self._partial = bytearray()
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._count = 0
        self._owed = 0  # bytes whose window is given back when the messages before them are taken
        self._deadline = None if request.timeout is None else time.monotonic() + request.timeout
        self._alarm: asyncio.TimerHandle | None = None
        self._greeted = False  # the headers of the answer are out
        self._last: bytes | None = None  # trailers that wait for the messages before them
        self._room: asyncio.Future[None] | None = None
        self._trailing: Metadata = ()
        self.ended = False  # nothing more can be sent
        if request.timeout is not None:
            self._alarm = connection.loop.call_later(request.timeout, self._expire)

    # a handler's context

    def invocation_metadata(self) -> Metadata:
        """What the client sent beside its message."""
        return self.request.metadata

    def peer(self) -> str:
        """The client's connection, as grpcio names it."""
        return self._connection.peer

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None where it set none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Go out with the status."""
        self._trailing = tuple(metadata)

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send the headers of the answer now."""
        assert not self._greeted, "headers go out once"
        self._greet(tuple(metadata))

    async def write(self, message: bytes) -> None:
        """Send a message; waits while the client has much unread."""
        if self.ended or self._last is not None:
            raise asyncio.CancelledError("the call has ended")
        self.offer(message)
        while len(self.unsent) > _MOST_UNSENT and not self.ended:
            self._room = self._connection.loop.create_future()
            await self._room

    def offer(self, message: bytes) -> bool:
        """Send a message; False where the next one is for :meth:`write`: the client has much unread, or has gone."""
        if self.ended or self._last is not None:
            return False
        if not self._greeted:
            self._greet(())
        data = b"\0" + len(message).to_bytes(4, "big") + message
        if not self.unsent and self._connection.sender.at_once(self, data):
            return True
        self.unsent = memoryview(bytes(self.unsent) + data)
        self._connection.sender.send(self)
        return len(self.unsent) <= _MOST_UNSENT

    async def sent(self) -> None:
        """Wait until the status is out, or the client has gone."""
        while not self.ended:
            self._room = self._connection.loop.create_future()
            await self._room

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> NoReturn:
        """End with that status; raises ``grpc.aio.AbortError``."""
        self.finish(code, details, tuple(trailing))
        raise grpc.aio.AbortError("the call was aborted")

    def cancelled(self) -> bool:
        """True where the client has gone."""
        return self.ended and self._last is None

    async def message(self) -> bytes | None:
        """The next message of the client; None after the last one."""
        return await self._messages.get()

    async def messages(self) -> AsyncIterator[bytes]:
        """All of them."""
        while (message := await self._messages.get()) is not None:
            if self._owed and self._messages.empty():
                self._connection.consumed(self, self._owed)
                self._owed = 0
            yield message

    # what its connection and its server tell it

    def on_data(self, payload: bytes) -> None:
        """A piece of the request. Raises StreamError where it goes on after its end."""
        if self.whole:
            raise frames.StreamError(frames.STREAM_CLOSED, "data after the end of the request")
        if self.ended or self._last is not None:
            return  # it has its status, which may have to wait for the client to read
        self._partial += payload
        if self._messages.empty():
            self._connection.consumed(
                self, len(payload)
            )  # bounded by the limit of a message, not by the window
        else:
            self._owed += len(payload)  # until its handler has taken what is there
        while len(self._partial) >= _PREFIX and not self.ended and self._last is None:
            length = int.from_bytes(self._partial[1:_PREFIX], "big")
            if self._partial[0]:
                self._refuse(Code.UNIMPLEMENTED, "compressed messages are not taken; identity is")
            elif length > self._limit:
                text = f"Received message larger than max ({length} vs. {self._limit})"
                self._refuse(Code.RESOURCE_EXHAUSTED, text)
            elif self._count and not self.request.streams:
                self._refuse(Code.UNIMPLEMENTED, "this method takes one message")
            elif len(self._partial) < _PREFIX + length:
                return
            else:
                self._messages.put_nowait(bytes(self._partial[_PREFIX : _PREFIX + length]))
                del self._partial[: _PREFIX + length]
                self._count += 1

    def on_end(self) -> None:
        """The client has sent everything."""
        self.whole = True
        if self.ended:
            return
        if self._partial or (not self._count and not self.request.streams):
            self._refuse(Code.INTERNAL, "the request ended within its message")
            return
        self._messages.put_nowait(None)

    def on_sent(self) -> None:
        """What waited is on its way."""
        if self._last is not None:
            self._send_last()
        elif self._room is not None and not self._room.done():
            self._room.set_result(None)

    def on_gone(self) -> None:
        """The client has gone, or does not want it any more."""
        if not self.ended:
            self._end()
            if self.task is not None:
                self.task.cancel()

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Send the status, behind the messages that wait. Only the first one counts."""
        if self.ended or self._last is not None:
            return
        trailing, alone = (*self._trailing, *trailing), not self._greeted
        try:
            self._last = trailers(code, details, trailing, alone=alone)
        except ValueError as error:  # an engine's metadata, which gRPC does not allow
            self._last = trailers(Code.INTERNAL, str(error), (), alone=alone)
        if not self.unsent:
            self._send_last()

    def _refuse(self, code: grpc.StatusCode, details: str) -> None:
        """End it whatever its handler does."""
        self.finish(code, details)
        if self.task is not None:
            self.task.cancel()

    def _greet(self, metadata: Metadata) -> None:
        block = headers(metadata)  # ValueError for what gRPC does not allow
        self._greeted = True
        if not self.ended and self._last is None:
            sender = self._connection.sender
            sender.write(frames.headers(self.stream_id, block, largest=sender.largest_frame))

    def _send_last(self) -> None:
        assert self._last is not None
        sender = self._connection.sender
        sender.write(frames.headers(self.stream_id, self._last, largest=sender.largest_frame, ends=True))
        self._end()
        self._connection.done(self)

    def _expire(self) -> None:
        self.unsent = memoryview(b"")
        self._last = None  # a status that waited for messages which are not to be sent any more
        self._refuse(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self) -> None:
        self.ended = True
        self._partial.clear()
        self.unsent = memoryview(b"")
        if self._alarm is not None:
            self._alarm.cancel()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
