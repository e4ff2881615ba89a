"""Start a router whose data plane is Envoy, or one that other gateways ask, in the running event loop."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from npufleet.cluster.addresses import netloc
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.router.away import AwayRequests
from npufleet.cluster.router.base import Policy
from npufleet.cluster.router.envoy.ask import VIA, Asked
from npufleet.cluster.router.envoy.authz import AuthzServer
from npufleet.cluster.router.envoy.ended import AccessLog
from npufleet.cluster.router.envoy.endpoint_picker import EndpointPicker
from npufleet.cluster.router.envoy.engines import EngineAddresses
from npufleet.cluster.router.envoy.picker_health import PickerHealth
from npufleet.cluster.router.envoy.process import EnvoyProcess, find_envoy
from npufleet.cluster.router.envoy.settings import EnvoySettings
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.registry import DEFAULT_POLICY
from npufleet.cluster.router.server import RouterHandle, serve_router, server_options
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.tls import ServerTls

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class EnvoyHandle:
    """A running router behind a running Envoy."""

    host: str
    router: RouterHandle
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
    def away(self) -> AwayRequests:
        """The requests that Envoy carries now."""
        return self.router.front.away

    @property
    def metrics(self) -> RouterMetrics:
        """The router's series."""
        return self.router.metrics

    async def series(self) -> bytes:
        """The router's series and Envoy's own, in the format of Prometheus."""
        text = generate_latest(self.metrics.registry)
        if self.envoy is not None:
            with suppress(OSError, aiohttp.ClientError):  # it is being started again
                text += (await self.envoy.admin.metrics()).encode()
        return text

    async def wait_ready(self, seconds: float) -> None:
        """As :meth:`RouterHandle.wait_ready`."""
        await self.router.wait_ready(seconds)

    async def drain(self, grace: float = 30.0) -> None:
        """Drain Envoy within ``grace`` seconds, then stop it. The picker goes on for the gateway."""
        if self.envoy is not None:
            await self.envoy.close(grace)

    async def close(self, grace: float = 30.0) -> None:
        """Drain, then stop the router. Twice does nothing more."""
        await self.drain(grace)
        await self._parts.aclose()


@dataclass(kw_only=True, eq=False)
class PickerHandle:
    """An Endpoint Picker that gateways elsewhere ask; as a context manager it closes at the end."""

    address: str  # host:port
    _parts: AsyncExitStack

    async def __aenter__(self) -> PickerHandle:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Answer no more."""
        await self._parts.aclose()


async def serve_envoy(
    source: EndpointSource,
    settings: EnvoySettings,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    registry: CollectorRegistry | None = None,
    keys: Keys | None = None,
    run: bool = True,
    warm: float = 0.0,
) -> EnvoyHandle:
    """Start a router over ``source`` and Envoy before it; both serve until the handle's ``close``.

    ``settings.folder`` must exist and be the router's own: whoever can write there chooses the engines. With
    ``keys`` each call must carry one. Without ``run`` everything but Envoy itself is started. With ``warm`` Envoy is
    started once each model has an engine that is ready, after that many seconds at the latest.
    OSError where a socket or the port cannot be had, ValueError without an Envoy or for an unknown policy.
    """
    if run:
        find_envoy(settings.binary)  # before anything is started
    if settings.tls is not None:
        settings.tls.check()
    keys = keys or Keys(())
    async with AsyncExitStack() as parts:
        _free(settings.front)
        router = await serve_router(
            source,
            host=f"unix:{settings.front}",
            policy=policy,
            registry=registry,
            settings=settings.router,
            keys=keys,
        )
        parts.push_async_callback(router.close, 0.0)
        asked = await _desk(router, settings.router, keys, settings.engines, parts)
        authz = AuthzServer(asked, settings.authz, settings.router.max_request_bytes)
        await authz.start()
        parts.push_async_callback(authz.close)
        handlers = [
            AccessLog(asked.away, asked.engines).handler(),
            EndpointPicker(asked, settings.router.max_request_bytes).handler(),
        ]
        _free(settings.picker)
        server, _ = await _serve(f"unix:{settings.picker}", handlers, router.picker, settings.router, None)
        parts.push_async_callback(server.stop, 0.0)
        envoy = None
        if warm:
            with suppress(TimeoutError):
                await router.wait_ready(warm)
        if run:
            envoy = EnvoyProcess(settings, lambda: asked.away.forget(VIA))
            await envoy.start()
        handle = EnvoyHandle(
            host=settings.host,
            router=router,
            asked=asked,
            authz=authz,
            envoy=envoy,
            _settings=settings,
            _parts=parts.pop_all(),
        )
    _log.info("Envoy listens on %s, engines are picked over %s", handle.address, settings.filter)
    return handle


async def serve_endpoint_picker(
    router: RouterHandle,
    settings: RouterSettings,
    address: str,
    *,
    keys: Keys | None = None,
    tls: ServerTls | None = None,
) -> PickerHandle:
    """Offer the Endpoint Picker of a running router on ``address`` (host:port) to gateways elsewhere.

    Gateways must be trusted: they tell how requests have gone, and with ``keys`` they pass on whose they are.
    OSError where the address cannot be had.
    """
    async with AsyncExitStack() as parts:
        asked = await _desk(router, settings, keys or Keys(()), None, parts)
        handlers = [EndpointPicker(asked, settings.max_request_bytes).handler()]
        server, port = await _serve(address, handlers, router.picker, settings, tls)
        parts.push_async_callback(server.stop, 0.0)
        bound = f"{address.rpartition(':')[0]}:{port}"
        _log.info("the Endpoint Picker listens on %s", bound)
        return PickerHandle(address=bound, _parts=parts.pop_all())


async def _desk(
    router: RouterHandle, settings: RouterSettings, keys: Keys, file: Path | None, parts: AsyncExitStack
) -> Asked:
    """What answers for ``router`` whoever asks; it ends with ``parts``."""
    engines = EngineAddresses(router.picker.pool, file)
    await engines.start()
    parts.push_async_callback(engines.close)
    return Asked(router.front.away, engines, router.metrics, settings, keys)


async def _serve(
    address: str,
    handlers: list[grpc.GenericRpcHandler],
    picker: Picker,
    settings: RouterSettings,
    tls: ServerTls | None,
) -> tuple[grpc.aio.Server, int]:
    """The server and its port."""
    server = grpc.aio.server(options=server_options(settings, reuse_port=False))
    server.add_generic_rpc_handlers(tuple(handlers))
    health_pb2_grpc.add_HealthServicer_to_server(PickerHealth(picker.pool), server)
    try:
        credentials = None if tls is None else tls.credentials()
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        await server.stop(None)
        raise OSError(f"the Endpoint Picker cannot listen on {address}: {error}") from error
    await server.start()
    return server, port


def _free(where: Path) -> None:
    """Remove the socket that a router before this one left."""
    with suppress(FileNotFoundError):
        where.unlink()
