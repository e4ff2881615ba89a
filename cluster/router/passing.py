"""One Generate or Embed request on its way through the router, and what of its answer has gone on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from npufleet.cluster.router.call import Call
from npufleet.cluster.router.picker import Lease, RequestInfo
from npufleet.cluster.router.replay.sent import Sent
from npufleet.cluster.router.requests import LiveRequest
from npufleet.cluster.router.split.base import Params
from npufleet.cluster.router.wire import answered_tokens
from npufleet.cluster.transport.http2.call import Http2Call
from npufleet.cluster.transport.http2.served import ServedCall


@dataclass(kw_only=True, slots=True)
class Job:
    """One request on its way through the router."""

    call: Call
    method: str
    raw: bytes
    info: RequestInfo
    live: LiveRequest
    arrived: float  # perf_counter seconds
    bound: str | None  # why no other engine can go on with its answer
    attempts: int = 0  # that failed
    params: Params | None = None  # of the hand-over of its prompt, once that has been computed elsewhere


@dataclass(kw_only=True, slots=True)
class Opened:
    """An attempt that got its first answer: the message, or EOF of a stream that ended with none."""

    lease: Lease
    rpc: Any  # grpc.aio.UnaryStreamCall or UnaryUnaryCall of raw bytes
    first: Any

    def drop(self) -> None:
        """Another engine was faster."""
        self.rpc.cancel()
        self.lease.release(grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class Passed:
    """What of an answer has gone on to the client."""

    context: Any  # grpcio's servicer context, or our own
    kept: Sent | None  # where another engine could go on with it
    lease: Lease | None = None  # of the engine whose part comes now
    sent: int = 0  # messages
    last: bytes = b""
    counted: int = 0  # tokens of the parts before

    async def all(self, rpc: Any, read: Any) -> None:
        """Pass on ``read`` and what follows it in ``rpc``."""
        pours = isinstance(rpc, Http2Call) and isinstance(self.context, ServedCall)
        while read is not grpc.aio.EOF:
            await self.one(read)
            read = grpc.aio.EOF if pours and await rpc.pour(self._offer) else await rpc.read()

    async def one(self, read: bytes) -> None:
        """Pass on ``read``."""
        await self.context.write(self._note(read))

    def unfinished(self) -> bool:
        """The stream has ended well, its answer has not; told only where another engine could go on with it."""
        return self.kept is not None and not self.kept.whole and self.kept.readable

    def part(self) -> int:
        """Tokens since this was last asked."""
        whole = answered_tokens(self.last, self.sent) if self.kept is None else len(self.kept.tokens)
        new, self.counted = max(0, whole - self.counted), max(whole, self.counted)
        return new

    def _offer(self, read: bytes) -> bool:
        return bool(self.context.offer(self._note(read)))

    def _note(self, read: bytes) -> bytes:
        if self.lease is not None:
            self.lease.heard()
        if self.kept is not None:
            read = self.kept.take(read)
        self.last = read
        self.sent += 1
        return read
