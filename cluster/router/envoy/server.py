"""Start a router whose data plane is Envoy, in the running event loop."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from npufleet.cluster.addresses import netloc
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.router.away import AwayRequests
from npufleet.cluster.router.base import Policy
from npufleet.cluster.router.envoy.ask import Asked
from npufleet.cluster.router.envoy.authz import AuthzServer
from npufleet.cluster.router.envoy.ended import AccessLog
from npufleet.cluster.router.envoy.endpoint_picker import EndpointPicker
from npufleet.cluster.router.envoy.engines import EngineAddresses
from npufleet.cluster.router.envoy.picker_health import PickerHealth
from npufleet.cluster.router.envoy.process import EnvoyProcess
from npufleet.cluster.router.envoy.settings import EnvoySettings
from npufleet.cluster.router.lookaside.tokens import TokenMint
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.registry import DEFAULT_POLICY
from npufleet.cluster.router.server import RouterHandle, serve_router, server_options

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class EnvoyHandle:
    """A running router behind a running Envoy."""

    host: str
    router: RouterHandle
    away: AwayRequests
    asked: Asked
    authz: AuthzServer
    envoy: EnvoyProcess | None  # None: somebody else runs Envoy
    _settings: EnvoySettings
    _parts: AsyncExitStack

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._settings.port if self.envoy is None else self.envoy.port

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return netloc(self.host, self.port)

    @property
    def picker(self) -> Picker:
        """What chooses."""
        return self.router.picker

    @property
    def metrics(self) -> RouterMetrics:
        """The router's series."""
        return self.router.metrics

    async def wait_ready(self, seconds: float) -> None:
        """As :meth:`RouterHandle.wait_ready`."""
        await self.router.wait_ready(seconds)

    async def close(self, grace: float = 30.0) -> None:
        """Drain Envoy within ``grace`` seconds, then stop it and the router. Twice does nothing more."""
        if self.envoy is not None:
            await self.envoy.close(grace)
        await self._parts.aclose()


async def serve_envoy(
    source: EndpointSource,
    settings: EnvoySettings,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    registry: CollectorRegistry | None = None,
    mint: TokenMint | None = None,
    run: bool = True,
) -> EnvoyHandle:
    """Start a router over ``source`` and Envoy before it; both serve until the handle's ``close``.

    ``settings.folder`` must exist and be the router's own: whoever can write there chooses the engines.
    ``mint`` signs tokens for a fleet with a secret. Without ``run`` everything but Envoy itself is started.
    OSError where a socket or the port cannot be had, ValueError without an Envoy or for an unknown policy.
    """
    envoy = EnvoyProcess(settings) if run else None  # first: it may not be installed
    async with AsyncExitStack() as parts:
        with suppress(FileNotFoundError):
            settings.front.unlink()
        router = await serve_router(
            source, host=f"unix:{settings.front}", policy=policy, registry=registry, settings=settings.router
        )
        parts.push_async_callback(router.close, 0.0)
        away = AwayRequests(router.picker, router.front.live, router.metrics, settings.router)
        away.start()
        parts.callback(away.close)
        engines = EngineAddresses(router.picker.pool, settings.engines)
        await engines.start()
        parts.push_async_callback(engines.close)
        asked = Asked(away, engines, router.metrics, mint, settings.router.max_request_bytes)
        authz = AuthzServer(asked, settings.authz, settings.router.max_request_bytes)
        await authz.start()
        parts.push_async_callback(authz.close)
        handlers = [
            AccessLog(away, engines).handler(),
            EndpointPicker(asked, settings.router.max_request_bytes).handler(),
        ]
        server = await _serve_grpc(settings, handlers, PickerHealth(router.picker.pool))
        parts.push_async_callback(server.stop, 0.0)
        if envoy is not None:
            await envoy.start()
        handle = EnvoyHandle(
            host=settings.host,
            router=router,
            away=away,
            asked=asked,
            authz=authz,
            envoy=envoy,
            _settings=settings,
            _parts=parts.pop_all(),
        )
    _log.info("Envoy listens on %s, engines are picked over %s", handle.address, settings.filter)
    return handle


async def _serve_grpc(
    settings: EnvoySettings, handlers: list[grpc.GenericRpcHandler], health: PickerHealth
) -> grpc.aio.Server:
    """What Envoy asks over gRPC."""
    with suppress(FileNotFoundError):
        settings.picker.unlink()
    server = grpc.aio.server(options=server_options(settings.router, reuse_port=False))
    server.add_generic_rpc_handlers(tuple(handlers))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"unix:{settings.picker}")
    await server.start()
    return server
