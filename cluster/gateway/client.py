"""vLLM's AsyncLLM over the fleet: the frontend's engine client, with our transport as its engine core.

AsyncLLM builds its engine-core client in ``__init__`` and offers no hook for another, so :class:`FleetClient`
sets the attributes itself. This is the one place that leans on vLLM's internals; a test compares them with
the installed release.
"""

from __future__ import annotations

import asyncio

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.renderers import BaseRenderer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from .metrics import ModelStats
from .outlet import Outlet
from .shortcut import Shortcut, Shortcuts
from .transport import GrpcEngineCore


class FleetClient(AsyncLLM):
    """An AsyncLLM whose engines are the fleet's. Must be made in the event loop it will run in."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        renderer: BaseRenderer,
        input_processor: InputProcessor,
        engine_core: GrpcEngineCore,
        stats: ModelStats,
    ) -> None:  # the parent's __init__ is left out on purpose: see the module's text
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = False
        self.log_stats = True
        self.renderer = renderer
        self.input_processor = input_processor
        self.output_processor = OutputProcessor(renderer.tokenizer, log_stats=True)
        self.engine_core = engine_core  # type: ignore[assignment]  # duck-typed on purpose
        self.logger_manager = stats  # type: ignore[assignment]
        self.admission_stats = None
        self.profiler = None
        self.output_handler: asyncio.Task[None] | None = None
        self._client_count = 1
        self._elastic_ep_lock = asyncio.Lock()
        self._profile_lock = asyncio.Lock()
        self._frontend_profiler_injected = False
        self._profile_session_guard_enabled = False
        self._profile_session_active = False
        self._shortcuts = Shortcuts(stats, self._fault)
        engine_core.attach(self._fail, self._restart)
        self._run_output_handler()

    def shortcut(
        self, request_id: str, outlet: Outlet, before: str, after: str, skipped: list[int]
    ) -> Shortcut | None:
        """A shorter way for what comes of the stream with vLLM's outer ``request_id``; None where there is none."""
        ids = self.output_processor.external_req_ids.get(request_id, ())
        state = self.output_processor.request_states.get(ids[0]) if len(ids) == 1 else None
        if state is None:
            return None
        made = self._shortcuts.make(state, outlet, before, after, skipped)
        engine_core: GrpcEngineCore = self.engine_core  # type: ignore[assignment]
        return made if made is not None and engine_core.shorten(state.request_id, made) else None

    def end(self, error: VLLMError) -> None:
        """End all running requests with ``error``."""
        for request_id in list(self.output_processor.request_states):
            self._fail(request_id, error)

    def _fault(self, request_id: str, fault: Exception) -> None:
        """End a request whose shortcut has a fault."""
        engine_core: GrpcEngineCore = self.engine_core  # type: ignore[assignment]
        engine_core.cancel([request_id])
        self._fail(request_id, VLLMError(f"the gateway failed: {type(fault).__name__}"))

    def _fail(self, request_id: str, error: VLLMError) -> None:
        """End a request (with all its choices) with ``error``, in the order that leaves nothing behind: the
        states are dropped first, then the error replaces the abort notice in the collector."""
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        siblings = self.output_processor.abort_requests([whole], internal=True)
        state.queue.put(error)
        engine_core: GrpcEngineCore = self.engine_core  # type: ignore[assignment]
        engine_core.cancel(sibling for sibling in siblings if sibling != request_id)

    def _restart(self, request: EngineCoreRequest) -> None:
        """Begin a request anew whose answer the client gets in one piece: what was generated so far is
        dropped."""
        old = self.output_processor.request_states.get(request.request_id)
        if old is None:
            return
        self.output_processor.request_states[request.request_id] = RequestState.from_new_request(
            tokenizer=self.output_processor.tokenizer,
            request=request,
            prompt=old.prompt,
            parent_req=old.parent_req,
            request_index=old.request_index,
            queue=old.queue,
            log_stats=self.output_processor.log_stats,
            stream_interval=self.output_processor.stream_interval,
        )
