"""The controller as a Serve deployment: placement, the endpoint registry, progress, service discovery.

One replica. It keeps nothing on disk: what NPUs are taken is read from Ray at each placement, and engines and
front ends repeat themselves with every heartbeat, so a restarted controller is whole again within seconds.
While it is away, requests flow as before; only changes wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ..config import FleetConfig, from_dict
from ..endpoints import EngineState
from ..metrics import discovery
from ..placement import ray_state
from .gone import closed
from .http import ControllerHttp
from .placer import Placer, nodes
from .progress import Phase, ProgressBoard
from .registry import EXPIRY_S, Registry
from .wire import endpoint_from_dict, endpoint_to_dict, snapshot_to_dict

logger = logging.getLogger(__name__)

WATCH_S = 10.0
"""How long a watch call waits for a change before it answers with the unchanged snapshot."""

SWEEP_S = 1.0


class Controller:
    """Owns where things sit and who is there. All methods run on one event loop, so none needs a lock but
    placement.
    """

    async def __init__(self, fleet: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self.config: FleetConfig = from_dict(fleet)
        self.registry = Registry()
        self.progress = ProgressBoard()
        self.placer = Placer(config=self.config, registry=self.registry, progress=self.progress)
        self._placing = asyncio.Lock()
        self._services: dict[str, tuple[str, str, float]] = {}  # by id: component, metrics URL, last heard of
        self._http = ControllerHttp(self)
        await self._http.start(self.config.metrics.host, self.config.metrics.port)
        self._sweeper = asyncio.create_task(self._sweep(), name="controller sweep")

    async def place(self, engine_id: str, model: str) -> dict[str, Any]:
        """Plan one engine and hold the NPUs for it; see :meth:`Placer.place`."""
        async with self._placing:
            state = await asyncio.to_thread(ray_state.read)
            return self.placer.place(state, engine_id, model)

    async def report(
        self, engine_id: str, model: str, phase: str, detail: str, seconds: dict[str, float]
    ) -> None:
        """Take over what an engine says about its start; a failed one needs the NPUs promised to it no
        more.
        """
        if phase in (Phase.FAILED, Phase.REFUSED):
            self.placer.forget(engine_id)
        self.progress.report(engine_id, model, Phase(phase), detail, seconds)

    async def heartbeat(self, endpoint: dict[str, Any]) -> str | None:
        """Register an engine or keep it alive; return why it has to end, None if it may stay."""
        self.registry.heartbeat(endpoint_from_dict(endpoint), time.monotonic())
        return self.placer.leaving.get(endpoint["engine_id"])

    async def unregister(self, engine_id: str) -> None:
        """Forget an engine that ends, and what was promised to it."""
        self.registry.remove(engine_id)
        self.progress.remove(engine_id)
        self.placer.forget(engine_id)

    async def set_state(self, engine_id: str, state: str) -> None:
        """Change the state of a registered engine. Raises ``ValueError`` if it is not known."""
        self.registry.set_state(engine_id, EngineState(state))

    async def service_heartbeat(self, service_id: str, component: str, metrics_url: str) -> None:
        """Register a front end (router, gateway) for service discovery, or keep it alive."""
        self._services[service_id] = (component, metrics_url, time.monotonic())

    async def watch(self, epoch: str, version: int) -> dict[str, Any]:
        """Return the snapshot as soon as it differs from (``epoch``, ``version``), or after ``WATCH_S``
        seconds.
        """
        return snapshot_to_dict(await self.registry.newer(epoch, version, WATCH_S))

    async def targets(self) -> list[dict[str, Any]]:
        """Return every Prometheus target of the fleet in the ``http_sd`` format."""
        services = [("controller", self._http.metrics_url)]
        services += [(component, url) for component, url, _ in self._services.values()]
        return discovery.targets(self.config.name, self.registry.snapshot().endpoints, services)

    async def status(self) -> dict[str, Any]:
        """Return what `npufleet status` shows: configuration, engines, their progress, NPUs."""
        state = await asyncio.to_thread(ray_state.read)
        snapshot = self.registry.snapshot()
        return {
            "fleet": self.config.name,
            "device": self.config.device,
            "epoch": snapshot.epoch,
            "version": snapshot.version,
            "npus": {
                "total": state.topology.npus,
                "reserved": sum(len(bundles) for bundles in state.groups.values()),
            },
            "nodes": nodes(state, self.placer.models()),
            "models": [
                {"name": m.name, "wanted": m.engines, "ready": len(snapshot.ready(m.name))}
                for m in self.config.models
            ],
            "engines": [endpoint_to_dict(endpoint) for endpoint in snapshot.endpoints],
            "progress": [entry.to_dict() for entry in self.progress.all()],
        }

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for endpoint in await closed(self.registry.silent(now)):
                logger.warning("engine %s is gone: its port is closed", endpoint.engine_id)
                self.registry.remove(endpoint.engine_id)
                self.progress.remove(endpoint.engine_id)
            for engine_id in self.registry.expire(now):
                logger.warning(
                    "engine %s was silent for %.0f s and is no longer published", engine_id, EXPIRY_S
                )
                self.progress.remove(engine_id)
            gone = [key for key, (_, _, seen) in self._services.items() if now - seen > EXPIRY_S]
            for key in gone:
                del self._services[key]

    async def check_health(self) -> None:
        """Fail when the sweeper died, so that Serve restarts the controller."""
        if self._sweeper.done():
            raise RuntimeError("the controller's sweep ended") from self._sweeper.exception()

    async def __del__(self) -> None:
        """Serve calls this when the replica stops."""
        self._sweeper.cancel()
        await self._http.stop()
