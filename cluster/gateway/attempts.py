"""One request, one engine after another until it is answered, refused or given up."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from ..router.errors import FULL, LOSSES, NoEngine
from ..router.picker import Lease, Picker, RequestInfo
from ..router.prefix.prompt import Media, TokenPrompt
from ..router.prefix.read import make
from ..router.replay.ends import Limits, finish_of
from ..router.replay.rules import continued, why_not
from ..router.retry import RetryBudget, worth_retrying
from ..router.split.requests import with_params
from ..router.split.splitter import Handed
from ..router.wire import with_rank
from ..transport.closed import closed_is_unavailable
from .engines import FeatureCache
from .errors import DEADLINE, TENANT, TRACE, client_error, no_engine, stalled, too_late
from .metrics import GatewayMetrics
from .requests import Outgoing
from .responses import ResponseReader
from .settings import GatewaySettings
from .shortcut import Shortcut

logger = logging.getLogger(__name__)

_GENERATE = f"/{pb.DESCRIPTOR.services_by_name['VllmEngine'].full_name}/Generate"


@dataclass(kw_only=True, slots=True)
class Job:
    """A request under way."""

    request: EngineCoreRequest
    outgoing: Outgoing  # for the next engine
    begun: Outgoing = field(init=False)
    whole: bool  # the client gets the answer in one piece, so nothing is sent before the end
    max_model_len: int
    task: asyncio.Task[None] | None = None
    calls: set[Any] = field(default_factory=set)  # the running gRPC calls
    tokens: int = 0  # read in this attempt
    heard_at: float = 0.0  # monotonic seconds of the last message, or of sending
    stalled_for: float | None = None  # set by the watch before it cancels the call
    tried: set[str] = field(default_factory=set)  # engine ids that failed this request
    answered_by: Lease | None = None  # whose answer, in one piece, has come
    handed: Handed | None = None  # of its prompt, where that was computed on another engine
    reader: ResponseReader | None = None  # of the stream in this attempt
    at_seam: bool = False  # its stream broke, and no other engine has said anything yet
    shortcut: Shortcut | None = None  # for tokens, while it is open
    ended: bool = False  # nothing but the message that ends the answer was missing
    said: array[int] = field(default_factory=lambda: array("I"))  # token ids of attempts that broke off

    def __post_init__(self) -> None:
        self.begun = self.outgoing  # what the first engine was sent

    @property
    def sent(self) -> int:
        """Tokens that the client may already have."""
        return 0 if self.whole else len(self.said) + self.tokens

    def cut(self, into: list[EngineCoreOutput]) -> bool:
        """The stream broke: keep what came of it and append what was held back; True where the answer was whole."""
        params = self.request.sampling_params
        assert params is not None
        if self.reader is not None:
            self.said.extend(self.reader.ids)
            eos = () if params.eos_token_id is None else (params.eos_token_id,)
            limits = Limits(eos=eos, max_model_len=self.max_model_len)
            self.ended = self.reader.cut(finish_of(self.begun.message, self.said, limits), into)
        self.reader, self.tokens, self.at_seam = None, 0, not self.ended
        return self.ended


@dataclass(frozen=True, slots=True)
class _Answered:
    """An engine's whole answer."""

    lease: Lease

    def drop(self) -> None:
        """Another engine was faster."""
        self.lease.release(grpc.StatusCode.CANCELLED)


class Attempts:
    """Serves jobs of one model deployment: leases an engine, streams, and tries again where that is safe."""

    def __init__(
        self,
        model: str,
        picker: Picker,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        features: FeatureCache,
        emit: Callable[[], list[EngineCoreOutput]],
    ) -> None:
        self.on_restart: Callable[[EngineCoreRequest], None] | None = None
        self._model = model
        self._picker = picker
        self._settings = settings
        self._metrics = metrics
        self._features = features
        self._emit = emit
        self._budget = RetryBudget(settings.retry_budget)

    async def serve(self, job: Job) -> VLLMError | None:
        """Run ``job`` to its end; the error that the client must get, or None when all outputs were
        emitted."""
        try:
            return await self._serve(job)
        finally:
            if job.at_seam:
                self._picker.on_resume(self._model, "failed")

    async def _serve(self, job: Job) -> VLLMError | None:
        fail: Callable[[str], VLLMError] | None = None  # of what broke the answer, told why nobody went on
        while True:
            try:
                async with asyncio.timeout_at(self._loop_deadline()):
                    if not job.tried:
                        await self._split(job)
                    lease = await self._picker.pick(job.handed.info if job.handed else self._info(job))
            except VLLMValidationError as error:
                return error
            except grpc.aio.AioRpcError as error:
                return client_error(error, job.sent)
            except TimeoutError:
                return too_late(job.sent)
            except NoEngine as error:
                self._metrics.no_engine.labels(self._model).inc()
                return fail("no other is ready") if fail else no_engine(error)
            if job.tried:
                self._metrics.retries.labels(self._model).inc()
                if job.tokens and self.on_restart is not None:
                    self.on_restart(job.request)
                job.tokens = 0
            code, details = grpc.StatusCode.CANCELLED, ""
            try:
                lease = await self._hedged(job, lease)
                code = grpc.StatusCode.OK
                return None
            except VLLMValidationError as error:
                return fail(str(error)) if fail and job.at_seam else error
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                if job.stalled_for is None:
                    if not job.at_seam or code is grpc.StatusCode.DEADLINE_EXCEEDED:
                        fail = partial(client_error, error, job.sent)
                    self._note(job, lease, f"{code.name}: {error.details()}")
                else:
                    code = grpc.StatusCode.INTERNAL  # asks for a probe of the engine
                    fail = partial(stalled, job.stalled_for, job.sent)
                    self._note(job, lease, f"silent for {job.stalled_for:.0f} s")
            finally:
                lease.release(code, job.tokens)
                self._metrics.attempts.labels(self._model, code.name).inc()
            assert fail is not None
            if job.sent:
                goes_on, why = self._behind(job, code)
                if not goes_on:
                    return None if job.ended else fail(why or (details if job.at_seam else ""))
            elif job.stalled_for is not None or self._why_no_other(job, code):
                return fail("")
            job.stalled_for = None

    def _why_no_other(self, job: Job, code: grpc.StatusCode) -> str:
        """Why a request that failed with ``code`` may not go to another engine; "" where it may, which is then paid."""
        if not worth_retrying(code, len(job.tried), self._settings.max_attempts):
            return f"the request has been on {len(job.tried)} engines"
        return "" if self._budget.take() else "too many requests change engines at once"

    def _behind(self, job: Job, code: grpc.StatusCode) -> tuple[bool, str]:
        """Make ready for another engine a job of whose answer the client has a part when its stream ends with ``code``.

        Whether it goes on, and what the error says of it where it does not; nothing where the answer was whole.
        """
        told, mode = partial(self._picker.on_resume, self._model), self._picker.pool.settings.resume
        if mode == "off" or not (code in LOSSES or (code in FULL and job.at_seam)):
            return False, ""
        if why := why_not(job.begun.message, job.begun.fields, mode):
            told("refused")
            return False, why
        if job.cut(self._emit()):
            told("ended")
            return False, ""
        if why := self._why_no_other(job, code):
            return False, why
        job.outgoing = replace(job.begun, message=continued(job.begun.message, job.said))
        return True, ""

    def _loop_deadline(self) -> float | None:
        """The client's deadline as the event loop's clock tells it; None where it set none."""
        left = None if DEADLINE.get() is None else _seconds_left(self._settings.request_timeout)
        return None if left is None else asyncio.get_running_loop().time() + left

    def _info(self, job: Job) -> RequestInfo:
        request = job.request
        return RequestInfo(
            model=self._model,
            prompt_tokens=len(request.prompt_token_ids or ()) + len(job.said),
            request_id=request.request_id,
            session=request.session_id or "",
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            excluded=frozenset(job.tried),
            prompt=_prompt(request, job.said),
            tenant=TENANT.get(),
        )

    async def _split(self, job: Job) -> None:
        """Have the prompt computed elsewhere first, where the engines have roles and it is long enough."""

        async def addressed(lease: Lease) -> tuple[pb.GenerateRequest, Sequence[tuple[str, str | bytes]]]:
            message, metadata, _ = await self._addressed(job, lease)
            return message, metadata

        timeout = _seconds_left(self._settings.request_timeout)
        job.handed = await self._picker.splitter.prefill(
            self._info(job), job.outgoing.message, addressed, timeout
        )

    async def _hedged(self, job: Job, lease: Lease) -> Lease:
        """One attempt, with a second engine for a short request that takes long. Returns the lease of the engine that
        answered; the other one's is given back.
        """
        hedges, prompt = self._picker.hedges, len(job.request.prompt_token_ids or ())
        settings = hedges.settings
        if not settings.max_tokens or job.handed or not settings.wanted(job.outgoing.message, prompt):
            await self._stream(job, lease)
            return lease

        async def attempt(one: Lease) -> _Answered:
            code = grpc.StatusCode.CANCELLED
            try:
                await self._stream(job, one)
                code = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                code = error.code()
                raise
            finally:
                if one is not lease and code is not grpc.StatusCode.OK:
                    one.release(code)
            return _Answered(one)

        async def second() -> Awaitable[_Answered] | None:
            other = await self._picker.second(self._info(job), lease)
            return None if other is None else attempt(other)

        begun = time.monotonic()
        answered = await hedges.run(self._model, attempt(lease), hedges.delay(self._model), second)
        hedges.learn(self._model, time.monotonic() - begun)
        if answered.lease is not lease:
            lease.release(grpc.StatusCode.CANCELLED)
        return answered.lease

    async def _addressed(
        self, job: Job, lease: Lease
    ) -> tuple[pb.GenerateRequest, Sequence[tuple[str, str | bytes]], bool]:
        """The request as that engine understands it, its metadata, and whether the answer will tell ranks."""
        if not job.outgoing.needs_features:
            return job.outgoing.message, job.outgoing.trace or TRACE.get(), False
        with closed_is_unavailable():
            features = await self._features.of(lease)
        message, metadata, ranked = job.outgoing.to_engine(features)
        return message, metadata if job.outgoing.trace else (*TRACE.get(), *metadata), ranked

    def _note(self, job: Job, lease: Lease, what: str) -> None:
        job.tried.add(lease.endpoint.engine_id)
        job.handed = None  # what comes next needs nobody else
        logger.warning(
            "engine %s (%s) failed request %s after %d tokens: %s",
            lease.endpoint.engine_id, lease.endpoint.address, job.request.request_id, job.tokens, what,
        )  # fmt: skip

    async def _stream(self, job: Job, lease: Lease) -> None:
        """One attempt on one engine. Raises ``AioRpcError``, or ``VLLMValidationError`` when the engine
        cannot take a field of the request."""
        message, metadata, ranked = await self._addressed(job, lease)
        raw = with_rank(message.SerializeToString(), lease.rank)
        reader = ResponseReader(
            job.request,
            stream=message.stream,
            ranked=ranked,
            max_model_len=job.max_model_len,
            said=len(job.said),
        )
        if message.stream:
            job.reader = reader
        done = False

        def take(raw: bytes) -> None:
            nonlocal done
            if job.answered_by not in (None, lease):
                return  # another engine was faster
            if not message.stream:
                job.answered_by = lease
            job.heard_at = time.monotonic()
            lease.heard()
            response = pb.GenerateResponse.FromString(raw)
            if job.shortcut is None or not reader.shorten(response, job.shortcut):
                done = reader.feed(response, self._emit())
            if not job.tokens:
                lease.started()
                self._budget.succeeded()
            if job.at_seam:
                job.at_seam = False
                self._picker.on_resume(self._model, "resumed")
            job.tokens = reader.tokens

        job.heard_at = time.monotonic()
        call = lease.channel.listen(
            _GENERATE,
            with_params(raw, job.handed.params) if job.handed else raw,
            on_message=take,
            metadata=metadata,
            timeout=_seconds_left(self._settings.request_timeout),
        )
        job.calls.add(call)
        try:
            with closed_is_unavailable():
                await call
        except grpc.aio.AioRpcError:
            if not done:  # otherwise only the status was missing
                raise
        finally:
            job.calls.discard(call)
            call.cancel()
            if job.shortcut is not None:
                job.shortcut.flush()
        if done:
            return
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="the engine ended the stream without finishing the answer",
        )


def _prompt(request: EngineCoreRequest, said: Sequence[int]) -> TokenPrompt | None:
    """The prompt, and what was ``said`` of the answer, as prefix caches see it; None where it is not token ids."""
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        return None
    media = [
        Media(identifier=item.identifier, offset=item.mm_position.offset, length=item.mm_position.length)
        for item in request.mm_features or ()
    ]
    adapter = request.lora_request.lora_name if request.lora_request else ""
    ids = [*request.prompt_token_ids, *said] if said else request.prompt_token_ids
    return make(ids, media, lora=adapter, salt=request.cache_salt or "")


def _seconds_left(most: float) -> float:
    """Seconds until the client's deadline, ``most`` where it set none or a later one."""
    deadline = DEADLINE.get()
    return most if deadline is None else min(most, max(0.0, deadline - time.monotonic()))
