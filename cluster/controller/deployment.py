"""The controller as a Serve deployment: placement, the endpoint registry, progress, changes, service discovery.

One replica. It keeps nothing on disk: what the fleet shall be comes from Serve, what NPUs are taken is read from
Ray at each placement, and engines and front ends repeat themselves with every heartbeat, so a restarted
controller is whole again within seconds. While it is away, requests flow as before; only changes wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .. import app
from ..config import FleetConfig, from_dict
from ..deploy.wish import Wish
from ..endpoints import EngineState
from ..metrics import discovery
from .autoscale import Autoscaler
from .changes import Changes
from .drains import left_to_serve, must_move, nodes_of, step
from .gone import closed
from .health import Health
from .hearing import Hearing
from .http import ControllerHttp
from .outcome import Look
from .placer import Placer, nodes
from .progress import ENDED, STARTING, EngineProgress, Phase, ProgressBoard
from .registry import EXPIRY_S, Registry
from .room import room, without
from .services import Services
from .status import status
from .view import HeadAway, RayView
from .wire import endpoint_from_dict, snapshot_to_dict

if TYPE_CHECKING:
    from ..engine.replica import Factory

logger = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 10.0
"""How long a watch call waits for a change before it answers with the unchanged snapshot."""

SWEEP_S = 1.0

SERVE_PATIENCE_S = 120.0

ARRANGE_S = 2.0
"""How often the fleet is compared with what Ray says."""


class Controller:
    """Owns where things sit and who is there. All methods run on one event loop, so none needs a lock but
    placement.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, wish: dict[str, Any], factory: Factory | None = None, secret: str = ""
    ) -> None:
        self.registry = Registry()
        self.progress = ProgressBoard()
        self.health = Health()
        self.changes = Changes(
            wish=Wish.from_dict(wish), submit=self._submit, room=self._room, look=self._look
        )
        self.autoscaler = Autoscaler(changes=self.changes, registry=self.registry, progress=self.progress)
        self.placer = Placer(
            config=self.changes.wish.effective(), registry=self.registry, progress=self.progress
        )
        self._factory = factory
        self._secret = secret
        self._ray = RayView()
        self._placing = asyncio.Lock()
        self._proven: set[str] = set()  # models that have had an engine
        self._services = Services()
        now = time.monotonic()
        self._hearing = Hearing(period=SWEEP_S, heard=now, looked=now)
        self._http = ControllerHttp(self)
        await self._http.start(self.config.metrics.host, self.config.metrics.port)
        self._loops = [
            asyncio.create_task(self._sweep(), name="controller sweep"),
            asyncio.create_task(self._arrange(), name="controller arrange"),
        ]

    @property
    def config(self) -> FleetConfig:
        """The configuration of the fleet now."""
        return self.changes.wish.config

    async def reconfigure(self, wish: dict[str, Any]) -> None:
        """Serve tells what the fleet shall be: after a start, and after each change."""
        self.changes.taken_over(Wish.from_dict(wish))
        self.health.remember(self.changes.wish.fenced)
        self.placer.config = self.changes.wish.effective()

    async def present(self) -> dict[str, Any]:
        """Return the configuration that the fleet follows now."""
        return self.config.to_dict()

    async def deploy(self, fleet: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        """Change the running fleet to what ``fleet`` describes, or only say what that means.

        Returns ``{"steps": [...]}``, or ``{"refused": why}``: a user's mistake is an answer, not a fault.
        """
        try:
            wish = self.changes.wish.changed_to(from_dict(fleet))
            planned = await (self.changes.propose(wish) if dry_run else self.changes.apply(wish))
        except (ValueError, HeadAway) as error:
            return {"refused": str(error)}
        return {"steps": [step.to_dict() for step in planned]}

    async def scale(self, model: str, engines: int, dry_run: bool) -> dict[str, Any]:
        """Change the number of engines of ``model``; answers as :meth:`deploy`."""
        try:
            wish = self.changes.wish.resized(model, engines)
            planned = await (self.changes.propose(wish) if dry_run else self.changes.apply(wish))
        except (ValueError, HeadAway) as error:
            return {"refused": str(error)}
        return {"steps": [step.to_dict() for step in planned]}

    async def drain(self, node: str, undo: bool) -> dict[str, Any]:
        """Empty a node (its id or address), or let engines come to it again.

        Returns ``{"engines": [engine ids that leave]}``, or ``{"refused": why}``.
        """
        try:
            state = await self._ray.now()
        except HeadAway as error:
            return {"refused": str(error)}
        known = {n.node_id: n.address for n in state.topology.nodes}
        found = [node_id for node_id, address in known.items() if node and node in (node_id, address)]
        found = found or [node_id for node_id in known if len(node) >= 6 and node_id.startswith(node)]
        if len(found) != 1:
            told = ", ".join(f"{node_id[:12]} ({address})" for node_id, address in known.items())
            return {"refused": f"{node!r} names {len(found)} nodes of the fleet; they are {told}"}
        await self.changes.adjust(lambda wish: wish.with_cordon(found[0], not undo))
        there = [e.engine_id for e in self.registry.snapshot().endpoints if found[0] in nodes_of(e)]
        return {"engines": [] if undo else there}

    async def place(self, engine_id: str, model: str, home: str = "") -> dict[str, Any]:
        """Plan one engine, whose process sits on the node ``home``, and hold the NPUs for it; see :meth:`Placer.place`.
        ``{"elsewhere": why}`` if its process has to start on another node first.

        Nodes come and go, and may come later than the fleet (after `ray up`, on Kubernetes), so an engine is not told
        "never", and if its model has run it may wait (``wait``) without end. One that a change brings has to fail, or
        the change could not be undone.
        """
        answer = await self._place(engine_id, model, home)
        if "refused" in answer and not self.changes.busy:
            return {**answer, "never": False, "wait": model in self._proven}
        return answer

    async def _place(self, engine_id: str, model: str, home: str) -> dict[str, Any]:
        seconds, why = self.health.wait(model)
        if seconds:
            return {"refused": why, "never": False}
        async with self._placing:
            try:
                state = await self._ray.now()
            except HeadAway as error:
                return {"refused": str(error), "never": False}
            cordoned = self.changes.wish.cordoned
            stay = {node.node_id for node in state.topology.nodes if node.npus} - state.draining
            if must_move(home, cordoned, stay):
                return {"elsewhere": "the node of its process is to be emptied"}
            return self.placer.place(without(state, self.health.fenced(), cordoned), engine_id, model, home)

    async def report(
        self, engine_id: str, model: str, phase: str, detail: str, seconds: dict[str, float],
        generation: str = "",
    ) -> None:  # fmt: skip
        """Take over what an engine says about its start; a failed one needs the NPUs promised to it no
        more.
        """
        entry = EngineProgress(
            engine_id=engine_id, model=model, phase=Phase(phase), detail=detail, seconds=dict(seconds),
            generation=generation, heard=time.monotonic(),
        )  # fmt: skip
        if entry.phase in ENDED:
            self.placer.forget(engine_id)
        self.progress.report(entry)

    async def heartbeat(self, endpoint: dict[str, Any], load: dict[str, float] | None = None) -> str | None:
        """Register an engine or keep it alive; ``load`` says how busy it is.

        Returns why it has to end, None if it may stay.
        """
        told = endpoint_from_dict(endpoint)
        self._hearing.heard = time.monotonic()
        self.registry.heartbeat(told, self._hearing.heard)
        self._proven.add(told.model)
        self.autoscaler.heard(told.engine_id, load or {})
        return self.placer.leaving.get(told.engine_id)

    async def unregister(self, engine_id: str) -> None:
        """Forget an engine that ends, and what was promised to it."""
        self.registry.remove(engine_id)
        self.progress.remove(engine_id)
        self.placer.forget(engine_id)

    async def died(self, engine_id: str, why: str) -> None:
        """Forget an engine that ends because of a fault, and remember the fault."""
        for endpoint in self.registry.snapshot().endpoints:
            if endpoint.engine_id == engine_id and endpoint.state is not EngineState.DRAINING:
                self.health.died(endpoint, why)
        await self.unregister(engine_id)

    async def set_state(self, engine_id: str, state: str) -> None:
        """Change the state of a registered engine. Raises ``ValueError`` if it is not known."""
        self.registry.set_state(engine_id, EngineState(state))

    async def service_heartbeat(
        self, service_id: str, component: str, metrics_url: str, refused: dict[str, int] | None = None
    ) -> None:
        """Register a front end (router, gateway) for service discovery, or keep it alive.

        ``refused`` says how many requests of each model it has turned away so far because no engine was there.
        """
        self.autoscaler.refused(service_id, refused or {})
        self._hearing.heard = time.monotonic()
        self._services.heard(service_id, component, metrics_url, self._hearing.heard)

    async def service_leaves(self, service_id: str) -> None:
        """Forget a front end that takes no new requests."""
        self._services.remove(service_id)

    async def watch(self, epoch: str, version: int) -> dict[str, Any]:
        """Return the snapshot as soon as it differs from (``epoch``, ``version``), or after ``WATCH_S``
        seconds.
        """
        return snapshot_to_dict(await self.registry.newer(epoch, version, WATCH_S))

    async def targets(self) -> list[dict[str, Any]]:
        """Return every Prometheus target of the fleet in the ``http_sd`` format."""
        services = [("controller", self._http.metrics_url)]
        services += self._services.targets()
        return discovery.targets(self.config.name, self.registry.snapshot().endpoints, services)

    async def status(self) -> dict[str, Any]:
        """Return what `npufleet status` shows: configuration, engines, their progress, NPUs."""
        state, silent = await self._ray.latest()
        told = status(self.changes, self.registry, self.progress, state)
        return {
            **told,
            "front_ends": {"wanted": self.config.front_ends, "ready": self._services.front_ends()},
            "head_silent_s": round(silent, 1),
            "nodes": nodes(state, self.placer.models(), self.changes.wish.cordoned),
            "health": self.health.to_dict(),
            "scaling": self.autoscaler.to_dict(),
        }

    async def _submit(self, wish: Wish, surge: Mapping[str, int]) -> None:
        self.placer.config = wish.effective()
        application = app.assemble(wish, self._factory, surge, self._secret)
        await self._surely(partial(app.submit, application))

    async def _surely(self, call: Callable[[], T]) -> T:
        """Ask Serve; while its controller or Ray's head is away, ask again, for ``SERVE_PATIENCE_S`` at most."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        end = time.monotonic() + SERVE_PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(call)
            except (RayError, RayServeException) as error:
                if time.monotonic() > end:
                    raise
                logger.warning("Serve does not answer, asking again: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def _room(self, wish: Wish) -> Mapping[str, int]:
        state = without(await self._ray.now(), self.health.fenced(), self.changes.wish.cordoned)
        return {model.name: room(state, model, wish.engines[model.name]) for model in wish.config.models}

    async def _look(self, began: float) -> Look:
        told = [entry for entry in self.progress.all() if entry.heard >= began]
        given_up = await self._surely(app.given_up)
        return Look(endpoints=self.registry.snapshot().endpoints, progress=tuple(told), given_up=given_up)

    async def _drain(self) -> None:
        """Let engines leave nodes that are cordoned or that Ray takes away, one of each model at a time."""
        wish, draining = self.changes.wish, (await self._ray.now()).draining
        if not (wish.cordoned or wish.lent or draining) or self.changes.busy:
            return
        endpoints = self.registry.snapshot().endpoints
        moved = left_to_serve(endpoints, draining)
        there = [endpoint for endpoint in endpoints if endpoint not in moved]
        room = await self._room(wish)
        starting = Counter(entry.model for entry in self.progress.all() if entry.phase in STARTING)
        made = step({*wish.cordoned, *draining}, there, wish.engines, wish.lent, room, starting)
        for engine_id in made.engines:
            self.placer.leaving[engine_id] = "its node is to be emptied"
        if made.scale:
            await self.changes.adjust(lambda wish: wish.lend(made.scale))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            fair = self._hearing.fair(now)
            for endpoint in await closed(self.registry.silent(now)):
                await self.died(endpoint.engine_id, "its process ended: nobody listens on its port")
            for endpoint in self.registry.expire(now) if fair else ():
                self.health.died(
                    endpoint, f"it was silent for {EXPIRY_S:.0f} s: its process or its node hangs"
                )
                self.progress.remove(endpoint.engine_id)
            self.progress.expire(now)
            await self._services.sweep(now, fair)
            self._hearing.looked = time.monotonic()

    async def _arrange(self) -> None:
        """What needs Ray and Serve: scale, empty nodes, keep fences for a controller after this one."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        while True:
            await asyncio.sleep(ARRANGE_S)
            try:
                await self.autoscaler.look(self.changes.scale)
                await self._drain()
                fences = self.health.fences()
                if fences.keys() != self.changes.wish.fenced.keys() and not self.changes.busy:
                    await self.changes.adjust(partial(replace, fenced=fences))
            except (HeadAway, RayError, RayServeException) as error:
                logger.warning("nothing can be changed now: %s", error)

    async def check_health(self) -> None:
        """Fail when a loop died, so that Serve restarts the controller."""
        for loop in self._loops:
            if loop.done():
                raise RuntimeError(f"{loop.get_name()} ended") from loop.exception()

    async def __del__(self) -> None:
        """Serve calls this when the replica stops."""
        for loop in self._loops:
            loop.cancel()
        await self.changes.stop()
        await self._http.stop()
