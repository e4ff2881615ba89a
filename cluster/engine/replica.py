"""One engine: a Serve replica that owns a placement group, vLLM's AsyncLLM and a gRPC service.

A dead engine core or worker ends the whole replica at once (crash-only): its streams fail, the controller
forgets it, its process exits, Ray takes the NPUs back, and Serve starts a new one. Nothing is repaired in
place, so there is one way to start and one way to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from .. import checkpoint, env
from ..addresses import WILDCARDS
from ..config import ModelConfig, from_dict
from ..controller.progress import REPEAT_S, Phase
from ..controller.registry import HEARTBEAT_S
from ..controller.wire import endpoint_to_dict
from ..deploy.wish import digest
from ..endpoints import EngineEndpoint, EngineState
from ..metrics import exporter
from ..placement import group as placement_group
from ..placement.plan import Bundle, Plan
from ..secret import fleet_secret
from . import last_words, orphan, pulse, sockets
from .build import preload, start
from .causes import Cause, StartFailed
from .client import GOODBYE_TIMEOUT_S, ControllerClient
from .load import LoadMeter
from .series import EngineInfo
from .start_watch import StartWatch
from .transfers import transfers

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 600.0
"""How long an engine waits for NPUs before its start fails; Serve then tries again. No limit where the controller says
so: for a model that has run already, and while there is no controller.
"""

GROUP_TIMEOUT_S = 60.0
WATCH_S = 0.2
DEAD = "the engine core or one of its workers died"
LAST_WORDS_S = 0.5  # for error messages of the broken streams to reach their clients

Factory = Callable[[ModelConfig, Plan, Any], Awaitable[Any]]
"""Makes the AsyncLLM: (model, plan, placement group) -> engine."""


class Engine:
    """One replica of one model deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        fleet: dict[str, Any],
        model: str,
        controller: DeploymentHandle,
        factory: Factory | None = None,
        secret: str = "",
    ) -> None:
        config = from_dict(fleet, part=True)
        self.config = next(entry for entry in config.models if entry.name == model)
        self._healing = config.healing
        self._tls = config.router.engine_tls
        self._secret = fleet_secret(config.router.secret, secret)
        self.engine_id = f"{_slug(model)}-{secrets.token_hex(4)}"
        self.dead: str | None = None  # why, once it is
        self._generation = digest(fleet)
        self._controller = ControllerClient(controller, self.engine_id, model, self._generation)
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._watched: StartWatch | None = None
        self._group: Any = None
        self._llm: Any = None
        self._places: tuple[str, ...] = ()
        self._server: Any = None
        self._shared: list[str] = []  # shared memory of the engine's processes
        self._sockets = sockets.make()
        started = False
        try:
            await self._start(config.metrics.host, factory)
            started = True
        finally:
            if not started:
                await self._give_up(sys.exception())

    async def _give_up(self, error: BaseException | None) -> None:
        """Say why the start failed, and give back what it took so far."""
        assert error is not None
        cause = error.cause if isinstance(error, StartFailed) else Cause.of(error)
        phase = Phase.REFUSED if cause.final else Phase.FAILED
        text = await last_words.told(cause, self._watched)
        logger.error("engine %s did not start: %s", self.engine_id, text)
        await self._controller.report(phase, text, self._seconds)
        await self._release()

    async def _start(self, metrics_host: str, factory: Factory | None) -> None:
        import ray

        if factory is None:
            self._check_checkpoint()
        tls = None if self._tls is None else self._tls.engine()  # looked at before the model is loaded
        importing = asyncio.create_task(asyncio.to_thread((lambda: None) if factory else preload))
        await self._controller.report(Phase.PLACING, "", self._seconds)
        plan, device = await self._place()
        self._group = await placement_group.create(plan, GROUP_TIMEOUT_S)
        self._seconds[str(Phase.PLACING)] = time.monotonic() - self._began
        await importing
        await self._load(factory or start, plan)
        from .guard import Guard
        from .service import serve_engine

        host = ray.util.get_node_ip_address()
        guard = Guard(self._secret, self.engine_id) if self._secret else None
        self._server = await serve_engine(self._llm, host, 0, guard=guard, tls=tls)
        self._info = EngineInfo(self.engine_id, self.config.name, device)
        # On the node's own address like the service, unless the user opened metrics to all.
        wide = metrics_host if metrics_host in WILDCARDS else host
        self._exporter = exporter.start(wide, node_address=host)
        self._endpoint = EngineEndpoint(
            engine_id=self.engine_id,
            model=self.config.name,
            address=self._server.address,
            metrics_url=self._exporter.url,
            state=EngineState.READY,
            device=device,
            node_id=ray.get_runtime_context().get_node_id(),
            npus=self.config.npus,
            ranks=self.config.data_parallel_size,
            ready_at=time.time(),
            generation=self._generation,
            places=self._places,
            role=self.config.role,
            serves=self.config.serves,
            **transfers(self._llm, host),
        )
        await self._controller.heartbeat(endpoint_to_dict(self._endpoint))
        await self._controller.report(Phase.READY, "", self._seconds)
        self._watcher = asyncio.create_task(self._watch(), name="engine watch")
        self._tasks = [asyncio.create_task(self._heartbeats(), name="engine heartbeats"), self._watcher]

    def _check_checkpoint(self) -> None:
        """Fail at once where the checkpoint is seen to be broken; one that is no folder is left to vLLM."""
        source = Path(self.config.source)
        if source.is_dir():
            for doubt in checkpoint.check(self.config.name, source, self.config.engine):
                logger.warning(doubt)

    async def _load(self, factory: Factory, plan: Plan) -> None:
        """Make the AsyncLLM, saying meanwhile how far it is."""
        import ray

        watch = StartWatch(size=len(plan.bundles), host=ray.util.get_node_ip_address(), seconds=self._seconds)
        self._watched = watch
        os.environ[env.PHASES] = watch.address  # for the workers, which inherit it
        making = asyncio.ensure_future(factory(self.config, plan, self._group))
        try:
            await self._follow(watch, making)
            self._llm = await making
            watch.finish()
        except StartFailed:
            raise
        except RuntimeError as error:  # what vLLM makes of every fault in the engine core
            watch.poll()  # the cause may have come with the last phases
            if watch.core.failure is None:
                raise
            raise StartFailed(watch.core.failure) from error
        finally:
            making.cancel()
            watch.poll()  # the last word is what the processes share
            self._shared = watch.core.shared
            self._places = tuple(map(_place_of, plan.bundles, watch.core.npus or ("",) * len(plan.bundles)))
            watch.close()

    async def _follow(self, watch: StartWatch, making: asyncio.Future[Any]) -> None:
        """Report what core and workers announce until the engine is made.

        Raises:
            RuntimeError: when a phase takes longer than it may.
        """
        told, repeat = "", 0.0
        while not making.done():
            watch.poll()
            if hangs := watch.overdue():
                raise RuntimeError(f"engine {self.engine_id} hangs in its start: {hangs}")
            if watch.describe() != told or time.monotonic() > repeat:
                told, repeat = watch.describe(), time.monotonic() + REPEAT_S
                await self._controller.report(Phase.LOADING, told, self._seconds)
            await asyncio.wait([making], timeout=WATCH_S)

    async def _place(self) -> tuple[Plan, str]:
        """Ask for NPUs until there are some; what is missing shows in the status meanwhile."""
        import ray

        home = ray.get_runtime_context().get_node_id()
        deadline = time.monotonic() + PLACE_TIMEOUT_S
        while True:
            answer = await self._controller.place(home)
            if why := answer.get("elsewhere"):
                logger.warning("engine %s starts on another node: %s", self.engine_id, why)
                await self._controller.unregister()
                await self._release()
                os._exit(0)  # Serve starts the next one
            refused = answer.get("refused")
            if refused is None:
                places = enumerate(zip(answer["nodes"], answer["npus"], strict=True))
                bundles = tuple(Bundle(rank=i, node_id=node, npu=npu) for i, (node, npu) in places)
                return Plan(engine_id=self.engine_id, bundles=bundles), answer["device"]
            late = time.monotonic() > deadline and not answer.get("wait")
            if answer["never"] or late:
                raise StartFailed(Cause(text=refused, final=answer["never"]))
            await self._controller.report(Phase.PLACING, refused, self._seconds)
            await asyncio.sleep(1.0)

    async def _heartbeats(self) -> None:
        meter = LoadMeter(registry=REGISTRY)
        while self.dead is None:
            why = await self._controller.heartbeat(endpoint_to_dict(self._endpoint), meter.read())
            if why:
                await self._leave(why)
            await asyncio.sleep(HEARTBEAT_S)

    async def _leave(self, why: str) -> None:
        """The controller wants the NPUs for others, or the node empty: let requests end, then end this process.

        Serve starts a new replica, which finds its place elsewhere or waits for room. It sees this one as well
        until then: it would cut off the requests of one that is not.
        """
        logger.warning("engine %s leaves: %s", self.engine_id, why)
        self._watcher.cancel()
        await self._drain(why)
        os._exit(0)  # the placement group goes with its owner

    async def _watch(self) -> None:
        """End this process soon after the engine core died or stopped to make progress."""
        beats = asyncio.create_task(
            pulse.watch(self._llm, lambda: self._server.last_token, self._healing.stall_s),
            name="engine pulse",
        )
        try:
            while not self._llm.errored and not beats.done():
                await asyncio.wait([beats], timeout=WATCH_S)
            stalled = beats.exception() if beats.done() else None
        finally:
            beats.cancel()
        self.dead = str(stalled) if isinstance(stalled, pulse.Stalled) else DEAD
        logger.error("engine %s: %s; ending it so that a new one takes its place", self.engine_id, self.dead)
        await self._controller.died(self.dead)
        await asyncio.sleep(LAST_WORDS_S)
        orphan.remove(self._shared)
        sockets.end(self._sockets)
        os._exit(1)  # no way back: exit handlers would wait for the dead

    async def check_health(self) -> None:
        """Serve calls this; it fails when the engine cannot answer any more."""
        if self.dead:
            raise RuntimeError(self.dead)
        await self._llm.check_health()

    async def __del__(self) -> None:
        """Serve calls this when the replica stops: drain, then give everything back."""
        if self._server is None:
            return
        for task in self._tasks:
            task.cancel()
        await self._drain()

    async def _drain(self, why: str = "it was asked to end") -> None:
        """Take no more requests, let those that run end, and give everything back."""
        self._endpoint = replace(self._endpoint, state=EngineState.DRAINING)
        await self._controller.heartbeat(endpoint_to_dict(self._endpoint), seconds=GOODBYE_TIMEOUT_S)
        beats = asyncio.create_task(self._last_heartbeats(), name="engine last heartbeats")
        await self._server.drain(self._healing.drain_s)
        beats.cancel()
        self.dead = why
        await self._controller.unregister()
        await self._release()

    async def _last_heartbeats(self) -> None:
        """Say that this engine is still draining: a silent one counts as dead."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._controller.heartbeat(endpoint_to_dict(self._endpoint))

    async def _release(self) -> None:
        """Give back engine core, port and NPUs; safe at any point of a start."""
        if self._server is not None:
            await self._server.stop()
            self._exporter.stop()
            self._server = None
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        if self._group is not None:
            with contextlib.suppress(ConnectionError):  # Ray itself may be gone already
                await asyncio.to_thread(placement_group.remove, self._group)
            self._group = None
        orphan.remove(self._shared)
        sockets.end(self._sockets)


def _place_of(bundle: Bundle, told: str) -> str:
    """Return NODE_ID:NUMBER of a rank: as planned, or as its worker tells where Ray chose the NPU."""
    return told or f"{bundle.node_id}:?" if bundle.npu is None else f"{bundle.node_id}:{bundle.npu}"


def _slug(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return kept.strip("-")[-40:] or "engine"
