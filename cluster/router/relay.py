"""Generate and Embed: pick an engine, relay the bytes, try another engine while nothing was answered yet."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from npufleet.cluster.router.call import Call, CallError, Metadata
from npufleet.cluster.router.errors import BROKE, LOST
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.picker import Lease, Picker, RequestInfo
from npufleet.cluster.router.requests import LiveRequest, LiveRequests
from npufleet.cluster.router.retry import RetryBudget, worth_retrying
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.split.base import Params
from npufleet.cluster.router.split.requests import with_params
from npufleet.cluster.router.wire import (
    ENGINE_KEY,
    answered_tokens,
    parse,
    path,
    pb,
    read_head,
    with_rank,
    with_request_id,
)
from npufleet.cluster.transport.http2.call import Http2Call
from npufleet.cluster.transport.http2.served import ServedCall

_CANCELLED = grpc.StatusCode.CANCELLED


@dataclass(kw_only=True, slots=True)
class _Job:
    """One request on its way through the router."""

    call: Call
    method: str
    raw: bytes
    info: RequestInfo
    live: LiveRequest
    arrived: float  # perf_counter seconds
    params: Params | None = None  # of the hand-over of its prompt, once that has been computed elsewhere


@dataclass(kw_only=True, slots=True)
class _Opened:
    """An attempt that got its first answer: the message, or EOF of a stream that ended with none."""

    lease: Lease
    rpc: Any  # grpc.aio.UnaryStreamCall or UnaryUnaryCall of raw bytes
    first: Any

    def drop(self) -> None:
        """Another engine was faster."""
        self.rpc.cancel()
        self.lease.release(_CANCELLED)


@dataclass(slots=True)
class _Passed:
    """What of an answer has gone on to the client."""

    lease: Lease
    context: Any  # grpcio's servicer context, or our own
    sent: int = 0  # messages
    last: bytes = b""

    async def all(self, rpc: Any, read: Any) -> None:
        """Pass on ``read`` and what follows it in ``rpc``."""
        pours = isinstance(rpc, Http2Call) and isinstance(self.context, ServedCall)
        while read is not grpc.aio.EOF:
            self._note(read)
            await self.context.write(read)
            read = grpc.aio.EOF if pours and await rpc.pour(self._offer) else await rpc.read()

    def _offer(self, read: bytes) -> bool:
        self._note(read)
        return bool(self.context.offer(read))

    def _note(self, read: bytes) -> None:
        self.lease.heard()
        self.last = read
        self.sent += 1


class Relay:
    """The two calls that cost an engine work."""

    def __init__(
        self, picker: Picker, live: LiveRequests, metrics: RouterMetrics, settings: RouterSettings
    ) -> None:
        self._picker = picker
        self._live = live
        self._metrics = metrics
        self._settings = settings
        self._budget = RetryBudget(settings.retry_budget)

    async def generate(self, raw: bytes, call: Call) -> None:
        """Relay a Generate stream; its messages are the engine's bytes."""
        await self._run("Generate", raw, call, self._generate)

    async def embed(self, raw: bytes, call: Call) -> bytes:
        """Relay an Embed call."""
        return await self._run("Embed", raw, call, self._embed)

    async def _run(
        self, method: str, raw: bytes, call: Call, answer: Callable[[_Job], Awaitable[Any]]
    ) -> Any:
        arrived = time.perf_counter()
        try:
            head = read_head(method, raw, call.metadata)
        except ValueError as error:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        call.seen["request_id"], call.seen["prompt_tokens"] = head.request_id, head.prompt_tokens
        model = self._picker.pool.resolve(call.model)
        call.model_label = model
        with (
            self._live.enter(head.request_id, call.peer) as live,
            self._metrics.of(model).in_flight.track_inprogress(),
        ):
            if live.engine_request_id != head.request_id:
                raw = with_request_id(raw, live.engine_request_id)
            info = RequestInfo(
                model=model,
                prompt_tokens=head.prompt_tokens,
                request_id=live.engine_request_id,
                session=call.session or head.session,
                cache_salt=head.cache_salt,
                priority=head.priority,
                prompt=head.prompt,
                tenant=call.tenant,
            )
            job = _Job(call=call, method=method, raw=raw, info=info, live=live, arrived=arrived)
            return await answer(job)

    async def _generate(self, job: _Job) -> None:
        whole = job.info
        await self._split(job)
        opened = await self._open(job, _read_first, whole)
        lease, rpc, context = opened.lease, opened.rpc, job.call.context
        code, passed = _CANCELLED, _Passed(lease, context)
        try:
            if metadata := await rpc.initial_metadata():  # without any it goes out with the first message
                await context.send_initial_metadata(tuple(metadata))
            read = opened.first
            if read is not grpc.aio.EOF:
                first = time.perf_counter() - job.arrived
                self._metrics.of(job.info.model).first_message.observe(first)
                job.call.seen["first_message"] = first
            await passed.all(rpc, read)
            engine = (ENGINE_KEY, lease.endpoint.engine_id)
            context.set_trailing_metadata((*(await rpc.trailing_metadata()), engine))
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise self._broken_off(error, lease, passed.sent) from error
        finally:
            if code is _CANCELLED:
                rpc.cancel()
            tokens = answered_tokens(passed.last, passed.sent)
            lease.release(code, tokens)
            job.call.seen["tokens"] = tokens
            self._metrics.tenant_tokens.labels(job.info.tenant.name).inc(tokens)

    async def _embed(self, job: _Job) -> bytes:
        opened = await self._open(job, _read_only, job.info)
        job.call.context.set_trailing_metadata(((ENGINE_KEY, opened.lease.endpoint.engine_id),))
        opened.lease.release()
        return opened.first

    async def _split(self, job: _Job) -> None:
        """Have the prompt computed elsewhere first, where the engines have roles and it is long enough."""
        if not self._picker.pool.splits(job.info.model):
            return
        request = parse(pb.GenerateRequest, job.raw)

        async def addressed(lease: Lease) -> tuple[pb.GenerateRequest, Metadata]:
            return request, job.call.forwarded()

        timeout = job.call.remaining(self._settings.request_timeout)
        try:
            handed = await self._picker.splitter.prefill(job.info, request, addressed, timeout)
        except grpc.aio.AioRpcError as error:
            raise CallError(error.code(), error.details() or error.code().name) from error
        if handed is not None:
            job.params, job.info = handed.params, handed.info

    async def _open(self, job: _Job, wait: Callable[[Any], Awaitable[Any]], whole: RequestInfo) -> _Opened:
        """Dispatch until an engine answers; raises CallError or NoEngine. A retry is for ``whole``, so that it needs
        nobody else.
        """
        attempts = 0
        while True:
            lease = await self._pick(job, attempts)
            job.live.lease = lease
            job.call.seen["engine"], job.call.seen["attempts"] = lease.endpoint.engine_id, attempts + 1
            try:
                opened = await self._hedged(job, lease, wait)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                attempts += 1
                job.live.lease = None
                job.info = replace(whole, excluded=job.info.excluded | {lease.endpoint.engine_id})
                job.params = None
                if not self._again(job, code, attempts):
                    raise self._failed(error, lease) from error
            else:
                opened.lease.started()
                self._budget.succeeded()
                return opened

    async def _try(self, job: _Job, lease: Lease, wait: Callable[[Any], Awaitable[Any]]) -> _Opened:
        """One attempt on one engine; where it fails its lease is given back."""
        rpc, code = None, _CANCELLED  # so it stays where neither an answer nor a status ends the attempt
        try:
            rpc = self._dispatch(job, lease)
            first = await wait(rpc)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise
        finally:
            if code is not grpc.StatusCode.OK:
                if rpc is not None:
                    rpc.cancel()
                lease.release(code)
        return _Opened(lease=lease, rpc=rpc, first=first)

    async def _hedged(self, job: _Job, lease: Lease, wait: Callable[[Any], Awaitable[Any]]) -> _Opened:
        """As :meth:`_try`, with a second engine for a short request that takes long."""
        hedges, model = self._picker.hedges, job.info.model
        settings = hedges.settings
        if not settings.max_tokens or job.method != "Generate" or job.params is not None:
            return await self._try(job, lease, wait)
        if not settings.wanted(parse(pb.GenerateRequest, job.raw), job.info.prompt_tokens):
            return await self._try(job, lease, wait)

        async def second() -> Awaitable[_Opened] | None:
            other = await self._picker.second(job.info, lease)
            return None if other is None else self._try(job, other, wait)

        begun, delay = time.perf_counter(), hedges.delay(model)
        opened = await hedges.run(model, self._try(job, lease, wait), delay, second)
        hedges.learn(model, time.perf_counter() - begun)
        job.live.lease = opened.lease
        job.call.seen["engine"] = opened.lease.endpoint.engine_id
        return opened

    async def _pick(self, job: _Job, attempts: int) -> Lease:
        if job.live.aborted:
            raise CallError(_CANCELLED, f"request {job.live.client_id!r} was aborted")
        lease = await self._picker.pick(job.info)
        if not attempts:
            self._metrics.of(job.info.model).overhead.observe(time.perf_counter() - job.arrived)
        return lease

    def _dispatch(self, job: _Job, lease: Lease) -> Any:
        kind = lease.channel.unary_stream if job.method == "Generate" else lease.channel.unary_unary
        timeout = job.call.remaining(self._settings.request_timeout)
        raw = with_params(with_rank(job.raw, lease.rank), job.params) if job.method == "Generate" else job.raw
        return kind(path(job.method))(raw, timeout=timeout, metadata=tuple(job.call.forwarded()))

    def _again(self, job: _Job, code: grpc.StatusCode, attempts: int) -> bool:
        others = any(m.engine_id not in job.info.excluded for m in self._picker.pool.pickable(job.info.model))
        if not others or not worth_retrying(code, attempts, self._settings.max_attempts):
            return False
        if not self._budget.take():
            self._metrics.retries_refused.inc()
            return False
        self._metrics.retries.labels(job.info.model, code.name).inc()
        return True

    def _failed(self, error: grpc.aio.AioRpcError, lease: Lease) -> CallError:
        """The status of a request whose last engine failed before any output."""
        engine_id = lease.endpoint.engine_id
        if error.code() not in LOST:
            return CallError.from_engine(error, engine_id)
        hint = CallError.from_no_engine(self._picker.pool.not_ready(lease.endpoint.model))
        prefix = f"engine {engine_id!r} could not take the request: "
        failure = CallError.from_engine(error, engine_id, prefix)
        failure.trailing = (*failure.trailing, *hint.trailing)
        return failure

    def _broken_off(self, error: grpc.aio.AioRpcError, lease: Lease, sent: int) -> CallError:
        """The status of a stream that broke after ``sent`` messages: too late to start over elsewhere."""
        engine_id = lease.endpoint.engine_id
        verb = "was lost" if error.code() in LOST else "failed" if error.code() in BROKE else ""
        prefix = f"engine {engine_id!r} {verb} after {sent} messages: " if verb else ""
        return CallError.from_engine(error, engine_id, prefix)


async def _read_first(rpc: Any) -> Any:
    return await rpc.read()


async def _read_only(rpc: Any) -> Any:
    return await rpc
