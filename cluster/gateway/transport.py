"""The engine core that vLLM's frontend talks to: one gRPC stream per request, to whichever engine the picker
leases.

:class:`GrpcEngineCore` stands where AsyncLLM keeps its engine-core client. A request whose engine fails
before anything reached the client is sent to another one; afterwards, or when attempts run out, it ends with
an error of its own. The object itself never dies: an engine's death concerns the requests on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from traceback import format_exc
from types import SimpleNamespace
from typing import Any, NoReturn

from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from ..router.picker import Picker
from .attempts import Attempts, Job
from .engines import FeatureCache
from .errors import removed
from .metrics import GatewayMetrics
from .requests import from_core_request
from .settings import GatewaySettings
from .shortcut import Shortcut

logger = logging.getLogger(__name__)

OnError = Callable[[str, VLLMError], None]
OnRestart = Callable[[EngineCoreRequest], None]
_WATCH_INTERVAL_S = 0.5


class GrpcEngineCore:
    """vLLM's engine-core interface over the fleet, for one model deployment.

    ``attach`` must be called before the first request. Not thread-safe: belongs to one event loop.
    """

    def __init__(
        self,
        model: str,
        picker: Picker,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        *,
        max_model_len: int,
        watermarks: bool = False,
    ) -> None:
        self.model = model
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._settings = settings
        self._max_model_len = max_model_len
        self._watermarks = watermarks
        self._jobs: dict[str, Job] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._taken: list[EngineCoreOutput] = []  # those before them, which the frontend reads piece by piece
        self._wake = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._on_error: OnError | None = None
        self._shut = False
        self._attempts = Attempts(
            model, picker, settings, metrics, FeatureCache(settings.control_timeout), self._emit
        )

    def attach(self, on_error: OnError, on_restart: OnRestart) -> None:
        """``on_error(request_id, error)`` ends a request with an error; ``on_restart(request)`` forgets what
        was generated for a request so far, because another engine begins it anew."""
        self._on_error = on_error

        def restart(request: EngineCoreRequest) -> None:
            # Also what the frontend has not read yet.
            self._outputs = [one for one in self._outputs if one.request_id != request.request_id]
            for one in self._taken:
                if one.request_id == request.request_id:
                    one.request_id = ""  # it ignores what comes for requests that it does not know
            on_restart(request)

        self._attempts.on_restart = restart

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._jobs)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """What the engines behind this gateway can do."""
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send ``request`` off; its outputs, or its error, come by themselves."""
        params = request.sampling_params
        if self._shut:  # it was rendered meanwhile
            self._fail(request.request_id, removed(self.model))
            return
        try:
            outgoing = from_core_request(request, watermarks=self._watermarks)
        except VLLMValidationError as error:
            self._fail(request.request_id, error)
            return
        whole = params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY
        job = Job(request=request, outgoing=outgoing, whole=whole, max_model_len=self._max_model_len)
        self._jobs[request.request_id] = job
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_streams(), name=f"gateway watch {self.model}")
        job.task = asyncio.create_task(self._run(job), name=f"gateway {request.request_id}")

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Cancel the streams of ``request_ids``; unknown ids are ignored."""
        self.cancel(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """As :meth:`abort_requests_async`, at once."""
        for request_id in request_ids:
            job = self._jobs.pop(request_id, None)
            if job is not None and job.task is not None:
                job.task.cancel()

    def shorten(self, request_id: str, shortcut: Shortcut) -> bool:
        """Let tokens of a request take ``shortcut`` while it is open; False where the request has ended."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.shortcut = shortcut
        return job is not None

    async def get_output_async(self) -> EngineCoreOutputs:
        """Every output that came in since the last call; waits for the first."""
        while not self._outputs:
            self._wake.clear()
            await self._wake.wait()
        self._taken, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=self._taken, timestamp=time.monotonic())

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel everything under way. May be called from any state, also more than once."""
        self._shut = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        self._jobs.clear()
        if self._watch is not None:
            tasks.append(self._watch)
            self._watch = None
        for task in tasks:
            if not task.get_loop().is_closed():
                task.cancel()

    def dp_engines_running(self) -> bool:
        """vLLM's data-parallel wave bookkeeping; the engines do it themselves."""
        return False

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Where KV events are published: each engine's service tells its own."""
        return {}

    def __getattr__(self, name: str) -> Any:
        """Administrative calls (sleep, LoRA, cache resets ...) concern one engine, and the gateway has
        many."""
        if name.startswith("_") or not (name.endswith("_async") or name in _ADMIN):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        async def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"{name.removesuffix('_async')} is not offered by the gateway: ask an engine"
            )

        return refuse

    def _emit(self) -> list[EngineCoreOutput]:
        """The list that outputs are appended to; wakes the reader."""
        self._wake.set()
        return self._outputs

    def _fail(self, request_id: str, error: VLLMError) -> None:
        assert self._on_error is not None, "attach() comes first"
        self._on_error(request_id, error)

    async def _run(self, job: Job) -> None:
        request_id = job.request.request_id
        try:
            error = await self._attempts.serve(job)
        except Exception as fault:  # noqa: BLE001 - supervisor: a fault ends its request, never in silence
            logger.error("request %s failed in the gateway:\n%s", request_id, format_exc())
            error = VLLMError(f"the gateway failed: {type(fault).__name__}")
        finally:
            self._jobs.pop(request_id, None)
        if error is not None:
            self._fail(request_id, error)

    async def _watch_streams(self) -> None:
        """End streams whose engine has gone silent: a frozen engine behind a live connection is seen only
        so."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            for job in list(self._jobs.values()):
                limit = self._limit(job)
                if job.calls and now - job.heard_at > limit:
                    job.stalled_for = limit
                    for call in job.calls:
                        call.cancel()

    def _limit(self, job: Job) -> float:
        if not job.outgoing.message.stream:
            return self._settings.request_timeout
        return self._settings.token_gap_timeout if job.tokens else self._settings.first_token_timeout


_ADMIN = frozenset({"prepare_elastic_ep", "commit_elastic_ep", "handle_fault", "get_status"})
