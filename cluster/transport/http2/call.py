"""One call over HTTP/2: what it still has to send, what came back, how it ended.

To its owner it is a ``grpc.aio`` call: awaitable where one message answers it, readable where a stream does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from npufleet.cluster.transport.base import OnMessage
from npufleet.cluster.transport.http2 import frames, status
from npufleet.cluster.transport.http2.headers import Block

if TYPE_CHECKING:
    from npufleet.cluster.transport.http2.connection import Connection

Code = grpc.StatusCode
_PREFIX = 5  # of a gRPC message: one byte that says whether it is compressed, four of its length


class Http2Call:
    """One call. Its connection calls ``on_*``, its owner everything else."""

    closes = True  # the end of the request is the end of our side

    def __init__(
        self,
        path: str,
        request: bytes,
        *,
        unary: bool,
        limit: int,
        decode: Callable[[bytes], Any] | None = None,
        on_message: OnMessage | None = None,
    ) -> None:
        self.path = path
        self.block = b""  # its request headers
        self.headers_size = 0  # what they count for in memory, in bytes
        self.unsent = memoryview(b"\0" + len(request).to_bytes(4, "big") + request)
        self.request = self.unsent  # as a whole, should it start over on another connection
        self.stream_id = 0
        self.connection: Connection | None = None
        self.send_window = self.receive_window = 0
        self.to_return = 0  # bytes whose window has not been given back yet
        self.moved = False  # it started over once already
        self.leave: Callable[[Http2Call], None] | None = None  # takes it out of the queue it waits in
        self._unary = unary
        self._limit = limit
        self._decode = decode
        self._on_message = on_message
        self._messages: deque[bytes] = deque()
        self._take: Callable[[bytes], bool] | None = None  # of whoever has the messages poured out
        self._partial = bytearray()
        self._initial: Block | None = None
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._cancelled = False
        self._waiters: list[asyncio.Future[None]] = []
        self._deadline: asyncio.TimerHandle | None = None

    # What its owner sees

    def done(self) -> bool:
        """True where it has ended."""
        return self._code is not None

    def cancel(self) -> bool:
        """End it now; the peer is told. False where it has ended already."""
        if self._code is not None:
            return False
        self._cancelled = True
        self._reset(frames.CANCEL)
        self.finish(Code.CANCELLED, "Locally cancelled by application!")
        return True

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """The metadata before the first message; empty where the call ends without any."""
        while self._initial is None and self._code is None:
            await self._wait()
        return grpc.aio.Metadata(*(self._initial.metadata if self._initial else ()))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """The metadata after the last message."""
        await self._end()
        return grpc.aio.Metadata(*self._trailing)

    async def code(self) -> grpc.StatusCode:
        """How it ended, once it has."""
        await self._end()
        assert self._code is not None
        return self._code

    async def details(self) -> str:
        """The text beside the code."""
        await self._end()
        return self._details

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``. Raises ``AioRpcError``."""
        while not self._messages:
            if self._code is not None:
                self._check()
                return grpc.aio.EOF
            await self._wait()
        message = self._messages.popleft()
        if self.connection is not None:
            self.connection.consumed(self, len(message) + _PREFIX)
        return message if self._decode is None else self._decode(message)

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Give ``take`` the bytes of each message as it is read, without waking anybody for it.

        True where the stream has ended; False where ``take`` was false, because it wants no more for now. Raises
        ``AioRpcError``.
        """
        while self._messages:
            message = self._messages.popleft()
            if self.connection is not None:
                self.connection.consumed(self, len(message) + _PREFIX)
            if not take(message):
                return False
        self._take = take
        try:
            while self._code is None and self._take is not None:
                await self._wait()
            full = self._take is None
        finally:
            self._take = None
        if full:
            return False
        self._check()
        return True

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        await self._end()
        self._check()
        if self._unary:
            message = self._messages[0]
            return message if self._decode is None else self._decode(message)
        return grpc.aio.Metadata(*self._trailing)

    async def _end(self) -> None:
        while self._code is None:
            await self._wait()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _check(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError(self._details)
        assert self._code is not None
        if self._code is not Code.OK:
            initial = grpc.aio.Metadata(*(self._initial.metadata if self._initial else ()))
            raise grpc.aio.AioRpcError(
                self._code, initial, grpc.aio.Metadata(*self._trailing), self._details, self._details
            )

    # What its connection and channel tell it

    def start_deadline(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """End with DEADLINE_EXCEEDED after ``seconds``."""
        self._deadline = loop.call_later(max(0.0, seconds), self._expire)

    @property
    def answered(self) -> bool:
        """True where anything came back, so that it cannot start over."""
        return self._initial is not None

    def on_sent(self) -> None:
        """The request is on its way."""

    def on_headers(self, block: Block, *, ends: bool) -> None:
        """Headers, or the trailers that end the call. Raises StreamError for what is neither."""
        if block.http is not None and 100 <= block.http < 200 and not ends:
            return
        if self._initial is None:
            if block.http != 200:
                text = f"the peer answered HTTP {block.http}"
                code = block.code or status.of_http(block.http or 0)
                self._stop(code, block.message or text)
                return
            if not block.content_type.startswith("application/grpc"):
                self._stop(Code.UNKNOWN, f"the peer's answer is not gRPC but {block.content_type[:80]!r}")
                return
            if not ends:
                self._initial = block
                self._wake()
                return
        elif not ends:
            raise frames.StreamError(frames.PROTOCOL_ERROR, "headers in the middle of an answer")
        self._trailing = block.metadata
        if block.code is None:
            self.finish(Code.UNKNOWN, "the answer ended without a gRPC status")
        elif self._partial:
            self.finish(Code.INTERNAL, "the answer ended within a message")
        elif block.code is Code.OK and self._unary and len(self._messages) != 1:
            self.finish(Code.INTERNAL, f"{len(self._messages)} messages answered a call that takes one")
        else:
            self.finish(block.code, block.message)

    def on_data(self, payload: bytes) -> None:
        """A piece of the answer: usually one whole message. Raises StreamError."""
        if self._initial is None:
            raise frames.StreamError(frames.PROTOCOL_ERROR, "data before headers")
        size = len(payload)
        if (
            not self._partial
            and size >= _PREFIX
            and not payload[0]
            and int.from_bytes(payload[1:_PREFIX], "big") == size - _PREFIX
        ):
            self._deliver(payload[_PREFIX:])
            return
        assert self.connection is not None
        self._partial += payload
        self.connection.consumed(self, size)  # bounded by the limit of a message, not by the window
        while len(self._partial) >= _PREFIX and self._code is None:
            if self._partial[0]:
                self._stop(Code.INTERNAL, "the peer sent a compressed message, which was not offered")
                return
            length = int.from_bytes(self._partial[1:_PREFIX], "big")
            if length > self._limit:
                self._stop(
                    Code.RESOURCE_EXHAUSTED, f"a message of {length} bytes; the limit is {self._limit}"
                )
                return
            if len(self._partial) < _PREFIX + length:
                return
            message = bytes(self._partial[_PREFIX : _PREFIX + length])
            del self._partial[: _PREFIX + length]
            self.to_return -= length + _PREFIX  # as a whole it counts again until it is read
            self._deliver(message)

    def on_reset(self, error: int) -> None:
        """The peer reset the stream."""
        self.finish(status.of_reset(error), f"the peer reset the stream (HTTP/2 error {error})")

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """It ended. Only the first end counts."""
        if self._code is not None:
            return
        self._code, self._details = code, details
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.leave is not None:
            self.leave(self)
            self.leave = None
        self.unsent = self.request = memoryview(b"")
        self._partial.clear()
        self._wake()

    def _deliver(self, message: bytes) -> None:
        if self._take is not None:
            assert self.connection is not None
            self.connection.consumed(self, len(message) + _PREFIX)
            if not self._take(message):
                self._take = None
                self._wake()
            return
        if self._on_message is None:
            self._messages.append(message)
            if self._waiters:
                self._wake()
            return
        assert self.connection is not None
        self.connection.consumed(self, len(message) + _PREFIX)
        try:
            self._on_message(message)
        except Exception as error:  # noqa: BLE001 - supervisor: a reader's fault ends its call, not the others
            self._stop(Code.INTERNAL, f"the answer could not be used: {error!r}")

    def _stop(self, code: grpc.StatusCode, details: str) -> None:
        self._reset(frames.CANCEL)
        self.finish(code, details)

    def _expire(self) -> None:
        self._reset(frames.CANCEL)
        self.finish(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _reset(self, error: int) -> None:
        if self.connection is not None:
            self.connection.reset(self, error)

    def _wake(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
