"""Generate and Embed: pick an engine, relay the bytes, try another engine while nothing was answered yet, and let one
go on with an answer that broke off where the request allows it (``replay/``).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from npufleet.cluster.router.call import Call, CallError, Metadata
from npufleet.cluster.router.errors import BROKE, LOSSES, LOST, NoEngine
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.passing import Job, Opened, Passed
from npufleet.cluster.router.picker import Lease, Picker, RequestInfo
from npufleet.cluster.router.replay.ends import finish_of
from npufleet.cluster.router.replay.known import KnownLimits
from npufleet.cluster.router.replay.rules import continued
from npufleet.cluster.router.replay.sent import Sent
from npufleet.cluster.router.requests import LiveRequests
from npufleet.cluster.router.retry import RetryBudget, worth_retrying
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.split.base import Stage
from npufleet.cluster.router.split.requests import with_params
from npufleet.cluster.router.wire import (
    ENGINE_KEY,
    parse,
    path,
    pb,
    read_head,
    with_rank,
    with_request_id,
)
from npufleet.cluster.transport.closed import closed_is_unavailable

_CANCELLED, _INTERNAL = grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL


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
        self._limits = KnownLimits()

    async def generate(self, raw: bytes, call: Call) -> None:
        """Relay a Generate stream; its messages are the engine's bytes."""
        await self._run("Generate", raw, call, self._generate)

    async def embed(self, raw: bytes, call: Call) -> bytes:
        """Relay an Embed call."""
        return await self._run("Embed", raw, call, self._embed)

    async def _run(self, method: str, raw: bytes, call: Call, answer: Callable[[Job], Awaitable[Any]]) -> Any:
        arrived = time.perf_counter()
        try:
            head = read_head(method, raw, call.metadata, self._settings.resume)
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
            job = Job(
                call=call, method=method, raw=raw, info=info, live=live, arrived=arrived, bound=head.bound
            )
            return await answer(job)

    async def _generate(self, job: Job) -> None:
        asked, whole = job.raw, job.info
        await self._split(job)
        opened: Opened | None = await self._open(job, _read_first, whole)
        passed = Passed(job.call.context, Sent() if job.bound is None else None)
        try:
            while opened is not None:
                lost = await self._pass(job, opened, passed)
                if lost is None:
                    return
                opened = await self._resume(job, asked, passed, opened.lease, lost)
        finally:
            job.call.seen["tokens"] = passed.counted

    async def _pass(self, job: Job, opened: Opened, passed: Passed) -> grpc.aio.AioRpcError | None:
        """Pass on what an engine says; how its stream broke, None where it did not."""
        lease, rpc, context = opened.lease, opened.rpc, job.call.context
        code, passed.lease = _CANCELLED, lease
        try:
            with closed_is_unavailable():
                if not passed.sent:
                    # Without any it goes out with the first message.
                    if metadata := await rpc.initial_metadata():
                        await context.send_initial_metadata(tuple(metadata))
                    if opened.first is not grpc.aio.EOF:
                        first = time.perf_counter() - job.arrived
                        self._metrics.of(job.info.model).first_message.observe(first)
                        job.call.seen["first_message"] = first
                await passed.all(rpc, opened.first)
                if passed.unfinished():
                    nothing = grpc.aio.Metadata()
                    raise grpc.aio.AioRpcError(
                        _INTERNAL, nothing, nothing, "it ended in the middle of the answer"
                    )
                engine = (ENGINE_KEY, lease.endpoint.engine_id)
                context.set_trailing_metadata((*(await rpc.trailing_metadata()), engine))
            code = grpc.StatusCode.OK
            return None
        except grpc.aio.AioRpcError as error:
            code = error.code()
            return error
        finally:
            if code is _CANCELLED:
                rpc.cancel()
            tokens = passed.part()
            lease.release(code, tokens)
            self._metrics.tenant_tokens.labels(job.info.tenant.name).inc(tokens)

    async def _resume(
        self, job: Job, asked: bytes, passed: Passed, lease: Lease, lost: grpc.aio.AioRpcError
    ) -> Opened | None:
        """An engine that goes on where the stream of ``lease`` broke; None where nothing but its end was missing.
        Raises CallError where there is none, with what broke the stream and why.
        """
        broken = self._broken_off(lost, lease, passed.sent)
        if lost.code() not in LOSSES or self._settings.resume == "off":
            raise broken from lost
        outcome, why, kept = "refused", job.bound or "", passed.kept
        opened = None
        try:
            if kept is not None:
                job.live.lease = None
                job.attempts += 1
                outcome = "failed"
                opened, why = await self._elsewhere(
                    job, parse(pb.GenerateRequest, asked), passed, lease, lost
                )
                outcome = "failed" if why else "ended" if opened is None else "resumed"
        finally:  # also of a client that leaves meanwhile
            self._metrics.on_resume(job.info.model, outcome)
        if why:
            broken.details += f"; nobody could go on with it: {why}"
            raise broken from lost
        if opened is None:
            job.call.context.set_trailing_metadata(((ENGINE_KEY, lease.endpoint.engine_id),))
        return opened

    async def _elsewhere(
        self,
        job: Job,
        request: pb.GenerateRequest,
        passed: Passed,
        lease: Lease,
        lost: grpc.aio.AioRpcError,
    ) -> tuple[Opened | None, str]:
        """The engine that goes on with the answer to ``request``, or None and why not; no reason: it was whole."""
        kept = passed.kept
        assert kept is not None
        kept.broke()
        if kept.whole:
            return None, ""
        if not kept.readable:
            return None, "a message of it could not be read"
        job.info = replace(job.info, excluded=job.info.excluded | {lease.endpoint.engine_id})
        if why := self._why_no_other(job, lost.code()):
            return None, why
        others = [
            m for m in self._picker.pool.pickable(job.info.model) if m.engine_id not in job.info.excluded
        ]
        limits = await self._limits.of(others, lambda: self._left(job, self._settings.control_timeout))
        if limits is None:
            return None, "no other engine could be asked what ends it"
        if not limits.eos and not request.sampling_params.ignore_eos:
            return None, "its engines do not tell which tokens end an answer"
        if (finish := finish_of(request, kept.tokens, limits)) is not None:
            passed.lease = None
            await passed.one(kept.ending(finish))
            return None, ""
        job.raw = continued(request, kept.tokens).SerializeToString()
        head = read_head("Generate", job.raw, job.call.metadata)
        job.params = None
        job.info = replace(job.info, prompt_tokens=head.prompt_tokens, prompt=head.prompt, stage=Stage.WHOLE)
        try:
            return await self._open(job, _read_first, job.info), ""
        except NoEngine as error:
            return None, str(error)
        except CallError as error:
            if error.code is _CANCELLED:
                raise
            return None, error.details

    async def _embed(self, job: Job) -> bytes:
        opened = await self._open(job, _read_only, job.info)
        job.call.context.set_trailing_metadata(((ENGINE_KEY, opened.lease.endpoint.engine_id),))
        opened.lease.release()
        return opened.first

    async def _split(self, job: Job) -> None:
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

    async def _open(self, job: Job, wait: Callable[[Any], Awaitable[Any]], whole: RequestInfo) -> Opened:
        """Dispatch until an engine answers; raises CallError or NoEngine. A retry is for ``whole``, so that it needs
        nobody else.
        """
        while True:
            lease = await self._pick(job)
            job.live.lease = lease
            job.call.seen["engine"], job.call.seen["attempts"] = lease.endpoint.engine_id, job.attempts + 1
            try:
                opened = await self._hedged(job, lease, wait)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                job.attempts += 1
                job.live.lease = None
                job.info = replace(whole, excluded=job.info.excluded | {lease.endpoint.engine_id})
                job.params = None
                if not self._again(job, code):
                    raise self._failed(error, lease) from error
            else:
                opened.lease.started()
                self._budget.succeeded()
                return opened

    async def _try(self, job: Job, lease: Lease, wait: Callable[[Any], Awaitable[Any]]) -> Opened:
        """One attempt on one engine; where it fails its lease is given back."""
        rpc, code = None, _CANCELLED  # so it stays where neither an answer nor a status ends the attempt
        try:
            rpc = self._dispatch(job, lease)
            with closed_is_unavailable():
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
        return Opened(lease=lease, rpc=rpc, first=first)

    async def _hedged(self, job: Job, lease: Lease, wait: Callable[[Any], Awaitable[Any]]) -> Opened:
        """As :meth:`_try`, with a second engine for a short request that takes long."""
        hedges, model = self._picker.hedges, job.info.model
        settings = hedges.settings
        if not settings.max_tokens or job.method != "Generate" or job.params is not None:
            return await self._try(job, lease, wait)
        if not settings.wanted(parse(pb.GenerateRequest, job.raw), job.info.prompt_tokens):
            return await self._try(job, lease, wait)

        async def second() -> Awaitable[Opened] | None:
            other = await self._picker.second(job.info, lease)
            return None if other is None else self._try(job, other, wait)

        begun, delay = time.perf_counter(), hedges.delay(model)
        opened = await hedges.run(model, self._try(job, lease, wait), delay, second)
        hedges.learn(model, time.perf_counter() - begun)
        job.live.lease = opened.lease
        job.call.seen["engine"] = opened.lease.endpoint.engine_id
        return opened

    async def _pick(self, job: Job) -> Lease:
        if job.live.aborted:
            raise CallError(_CANCELLED, f"request {job.live.client_id!r} was aborted")
        lease = await self._picker.pick(job.info)
        if not job.attempts:
            self._metrics.of(job.info.model).overhead.observe(time.perf_counter() - job.arrived)
        return lease

    def _dispatch(self, job: Job, lease: Lease) -> Any:
        kind = lease.channel.unary_stream if job.method == "Generate" else lease.channel.unary_unary
        timeout = self._left(job, self._settings.request_timeout)
        raw = with_params(with_rank(job.raw, lease.rank), job.params) if job.method == "Generate" else job.raw
        return kind(path(job.method))(raw, timeout=timeout, metadata=tuple(job.call.forwarded()))

    def _left(self, job: Job, most: float) -> float:
        """Seconds that a call to an engine may take, ``most`` at most: all attempts share the request's."""
        left = self._settings.request_timeout - (time.perf_counter() - job.arrived)
        return min(most, max(0.0, job.call.remaining(left)))

    def _again(self, job: Job, code: grpc.StatusCode) -> bool:
        if self._why_no_other(job, code):
            return False
        self._metrics.retries.labels(job.info.model, code.name).inc()
        return True

    def _why_no_other(self, job: Job, code: grpc.StatusCode) -> str:
        """Why a request that failed with ``code`` may not go to another engine; "" where it may, which is then paid."""
        if not any(m.engine_id not in job.info.excluded for m in self._picker.pool.pickable(job.info.model)):
            return "no other engine is ready"
        if not worth_retrying(code, job.attempts, self._settings.max_attempts):
            return f"it has been on {job.attempts} engines"
        if not self._budget.take():
            self._metrics.retries_refused.inc()
            return "too many requests go to other engines at once"
        return ""

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
