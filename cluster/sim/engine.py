"""A simulated engine in real time: an AsyncLLM over vLLM's scheduler and a device-time model.

Frontend (rendering, output processing), scheduler, KV-cache manager and the event publisher are vLLM's; the
service in front is ``engine/service.py``. What stands in for the engine core's process and its workers is
:class:`SimCoreClient`: it lets each step take its seconds on the event loop's clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request

from npufleet.cluster.gateway.client import FleetClient
from npufleet.cluster.sim.scheduler import SchedulerCore
from npufleet.cluster.sim.timing import DeviceTime

_log = logging.getLogger(__name__)


class LastStats:
    """Keeps the scheduler's last statistics where vLLM's service looks for them."""

    def __init__(self) -> None:
        self.last_scheduler_stats: Any = None
        self.engine_index = 0
        self.stat_loggers = [self]

    def record(self, scheduler_stats: Any, *args: Any, **more: Any) -> None:
        """Keep ``scheduler_stats``, if there are any."""
        if scheduler_stats is not None:
            self.last_scheduler_stats = scheduler_stats

    def record_admission_rejection(self, reason: Any) -> None:
        """Nothing to keep."""

    def log(self) -> None:
        """Nothing to write."""


class SimCoreClient:
    """What AsyncLLM takes for its engine core. Belongs to one event loop."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.steps = 0
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._run: asyncio.Task[None] | None = None

    def attach(self, *ignored: Any) -> None:
        """Called once the AsyncLLM stands: begin to step."""
        self._run = asyncio.create_task(self._steps(), name="simulated engine")
        self._run.add_done_callback(self._ended)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self.core.take(Request.from_engine_core_request(request, self.core.hasher))
        self._wake.set()

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Give requests up; unknown ids are ignored."""
        self.cancel(request_ids)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """As :meth:`abort_requests_async`, at once."""
        for request_id in request_ids:
            self.core.abort(request_id)
        self._wake.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs of the next step that has any."""
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """It generates."""
        return ("generate",)

    async def reset_prefix_cache_async(self, *args: Any, **more: Any) -> bool:
        """Empty the prefix cache; False while a block is in use."""
        return self.core.scheduler.reset_prefix_cache()

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Where the scheduler publishes its KV events."""
        config = self.core.scheduler.get_kv_event_publisher_config()
        return {} if config is None else {0: config}

    def dp_engines_running(self) -> bool:
        """It has one rank."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop. May be called more than once."""
        run, self._run = self._run, None
        if run is not None:
            run.cancel()
            self.core.close()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        core = self.core
        due = loop.time()
        while True:
            if not core.busy:
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
            # A step begins when the last one should have ended: what the host adds does not add up.
            due = max(due, loop.time() - 0.05) + core.begin().first
            await asyncio.sleep(due - loop.time())
            core.end(1)
            self.steps += 1
            for outputs in core.outputs:
                outputs.timestamp = time.monotonic()
                self._outputs.put_nowait(outputs)
            if not core.outputs:
                await asyncio.sleep(0)

    def _ended(self, run: asyncio.Task[None]) -> None:
        if not run.cancelled() and (error := run.exception()) is not None:
            _log.error("the simulated engine failed", exc_info=error)
            self.resources.engine_dead = True


class SimEngine(FleetClient):
    """An AsyncLLM whose device is simulated. Must be made in the event loop that it will run in."""

    def __init__(self, config: VllmConfig, device: DeviceTime) -> None:
        renderer = renderer_from_config(config)
        self.core_client = SimCoreClient(SchedulerCore(config, device))
        super().__init__(
            config,
            renderer,
            InputProcessor(config, renderer),
            self.core_client,  # type: ignore[arg-type]  # what FleetClient asks of an engine core, it has
            LastStats(),  # type: ignore[arg-type]
        )

    async def check_health(self) -> None:
        """Raise where the engine has failed."""
        if self.errored:
            raise self.dead_error
