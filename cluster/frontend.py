"""The front end as a Serve deployment: gRPC router and OpenAI gateway in one process, on their own ports.

Both use one picker, so both see the same loads. The process needs no NPU. When it dies Serve starts another
one, which takes the same ports as soon as they are free. Several front ends (``front_ends``) sit on nodes of their own
where there are enough; those of one node share its ports (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .addresses import netloc, reachable
from .admission.tenants import read_key_file
from .config import FleetConfig, GatewayConfig, ModelConfig, RouterConfig
from .controller.registry import HEARTBEAT_S
from .controller.source import ControllerSource
from .deploy.wish import Wish
from .gateway.process import GATEWAY_ENV, prepare_process
from .port_claim import PortClaim
from .router.settings import WARM_SECONDS
from .secret import as_file

if TYPE_CHECKING:
    from aiohttp.web import AppRunner
    from ray.serve.handle import DeploymentHandle

    from .gateway.server import Gateway
    from .gateway.settings import ModelSpec
    from .router.fleet_router import FleetRouter

logger = logging.getLogger(__name__)

FRONT_ENVIRONMENT = {**GATEWAY_ENV, "VLLM_DO_NOT_TRACK": "1"}
"""Environment of the process; Ray sets it before anything is imported."""

BIND_TIMEOUT_S = 30.0
"""How long a new front end waits for its ports: the one it replaces may still hold them."""

GRACE_S = 30.0
"""How long running requests may go on when the front end stops."""

T = TypeVar("T")


class Frontend:
    """Router and gateway of one fleet."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, wish: dict[str, Any], controller: DeploymentHandle, engines: list[Any], secret: str = ""
    ) -> None:
        """``engines`` are the engine deployments' handles: Serve deploys them because they are named here."""
        prepare_process()
        start = Wish.from_dict(wish)
        self._wish = start
        self._secret = as_file(secret)
        self._served: dict[str, ModelSpec] = {}  # by the gateway now
        self._id = f"front-{secrets.token_hex(4)}"
        self._controller = controller
        from .gateway.metrics import GatewayMetrics

        self._metrics = GatewayMetrics()
        self._describe()
        self._exporter: AppRunner | None = None
        self._claims = [
            await bound(partial(self._claim, door), BIND_TIMEOUT_S)
            for door in (self.config.router, self.config.gateway)
        ]
        others = self.config.front_ends > 1 or any(claim.shared for claim in self._claims)
        self._warm = WARM_SECONDS if others else 0.0
        self._router: FleetRouter = await bound(self._start_router, BIND_TIMEOUT_S)
        self._gateway: Gateway = await bound(self._start_gateway, BIND_TIMEOUT_S)
        self._beats = asyncio.create_task(self._heartbeats(), name="front end heartbeats")
        for model in self.config.models:
            if start.engines[model.name] and not model.serves:
                await self._gateway.wait_ready(model.name)

    @property
    def config(self) -> FleetConfig:
        """The configuration of the fleet now."""
        return self._wish.config

    async def reconfigure(self, wish: dict[str, Any]) -> None:
        """Serve tells what the fleet shall be: after a start, when a change begins, and when it is over.

        While a change is under way a model keeps its frontend: it asks an engine for its settings, and may meet
        one that is about to leave.
        """
        self._wish = Wish.from_dict(wish)
        wanted = {model.name: model_spec(model) for model in self.config.models if not model.serves}
        for name in self._served.keys() - wanted.keys():
            self._gateway.retire_model(name)
            del self._served[name]
        for name, spec in wanted.items():
            if name not in self._served:
                self._gateway.add_model(spec)
            elif spec != self._served[name] and self._wish.previous is None:
                self._gateway.replace_model(spec)
            else:
                continue
            self._served[name] = spec

    def _describe(self) -> None:
        from prometheus_client import Gauge

        info = Gauge(
            "npufleet_fleet_info",
            "Always 1; its labels say which fleet this front end serves and on which kind of device.",
            ["fleet", "device", "policy"],
            registry=self._metrics.registry,
        )
        info.labels(self.config.name, self.config.device, self.config.router.policy).set(1)

    async def _start_router(self) -> FleetRouter:
        import ray

        from .router.fleet_router import start_router

        router = self.config.router
        return await start_router(
            replace(router, secret=router.secret or self._secret),
            lambda: ControllerSource(self._controller),
            keys=router.api_keys or self.config.gateway.api_keys,
            registry=self._metrics.registry,
            metrics_host=reachable(self.config.gateway.host, ray.util.get_node_ip_address()),
            warm=self._warm,
        )

    async def _start_gateway(self) -> Gateway:
        from .gateway.server import serve_gateway
        from .gateway.settings import GatewaySettings

        gateway = self.config.gateway
        settings = GatewaySettings(
            host=gateway.host,
            port=gateway.port,
            reuse_port=True,
            api_keys=read_key_file(gateway.api_keys, "gateway.api_keys"),
            shutdown_grace=GRACE_S,
            tls=gateway.tls,
            access_log=gateway.access_log,
            otlp_endpoint=gateway.otlp_endpoint,
        )
        self._served = {model.name: model_spec(model) for model in self.config.models if not model.serves}
        return await serve_gateway(
            self._served.values(), self._router.picker, settings, metrics=self._metrics, warm=self._warm
        )

    async def _claim(self, door: RouterConfig | GatewayConfig) -> PortClaim:
        import ray

        cluster = ray.get_runtime_context().gcs_address  # it has one fleet
        return PortClaim(door.host, door.port, f"{self.config.name} {cluster}")

    async def _metrics_urls(self, host: str) -> dict[str, str]:
        """Where this front end's series are: on a port of its own where the gateway's may be another one's too."""
        from .router.processes.exporter import on_port, port_of

        scheme = "http"
        if self.config.front_ends == 1:
            port = self._gateway.port
            scheme = "http" if self.config.gateway.tls is None else "https"
        else:
            if self._exporter is None:

                async def series() -> bytes:
                    return self._gateway.series()

                self._exporter = await on_port(host, 0, series)
            port = port_of(self._exporter)
        urls = {"gateway": f"{scheme}://{netloc(host, port)}/metrics"}
        if self._router.metrics_port:
            urls["router"] = f"http://{netloc(host, self._router.metrics_port)}/metrics"
        return urls

    async def _heartbeats(self) -> None:
        import ray
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        host = reachable(self.config.gateway.host, ray.util.get_node_ip_address())
        while True:
            for role, url in (await self._metrics_urls(host)).items():
                name = self._id if role == "gateway" else f"{self._id}-{role}"
                call = self._controller.service_heartbeat.remote(
                    name, role, url, self._gateway.turned_away if role == "gateway" else None
                )
                try:
                    await asyncio.wait_for(call, 5.0)
                except (RayError, RayServeException, TimeoutError) as error:
                    logger.warning("the controller does not answer: %r", error)
            for claim in self._claims:
                claim.touch()
            await asyncio.sleep(HEARTBEAT_S)

    async def _say_goodbye(self) -> None:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            await asyncio.wait_for(self._controller.service_leaves.remote(self._id), 1.0)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.info("the controller was not told: %r", error)  # it ends too, or will notice

    async def check_health(self) -> None:
        """Serve calls this. An unreachable engine is no fault of the front end; a dead server task is."""
        if self._beats.done():
            raise RuntimeError("the front end's heartbeats ended") from self._beats.exception()

    async def __del__(self) -> None:
        """Serve calls this when the replica stops: no new requests, running ones go on for a while."""
        if hasattr(self, "_beats"):
            self._beats.cancel()
            await self._say_goodbye()
        # Both at once: what still took requests while the other drained would be cut off with them.
        if hasattr(self, "_gateway"):
            await asyncio.gather(self._gateway.close(), self._router.drain(GRACE_S))
        if hasattr(self, "_router"):
            await self._router.close(GRACE_S)
        if hasattr(self, "_exporter") and self._exporter is not None:
            await self._exporter.cleanup()
        for claim in getattr(self, "_claims", ()):
            claim.close()


def model_spec(model: ModelConfig) -> ModelSpec:
    """Return what the gateway needs to know of a model deployment."""
    from .gateway.settings import ModelSpec

    return ModelSpec(name=model.name, source=model.source, args=model.engine)


async def bound(start: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return what ``start`` returns, trying again for ``seconds`` seconds while its port is taken.

    Raises:
        OSError: the last one, when the time is over.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await start()
        except OSError as error:
            if loop.time() > deadline:
                raise
            logger.warning("waiting for a port: %s", error)
        await asyncio.sleep(0.2)
