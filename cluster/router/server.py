"""Start a router in the running event loop.

No signal handling and no process of its own, so that it can live beside the gateway and share its picker.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry

from npufleet.cluster.addresses import netloc
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.router.base import Policy
from npufleet.cluster.router.front import Front
from npufleet.cluster.router.ledger import Peers
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.pool import EnginePool
from npufleet.cluster.router.prefix.metrics import PrefixCollector
from npufleet.cluster.router.registry import DEFAULT_POLICY, load_policy
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.http2.server import Http2Server
from npufleet.cluster.transport.http2.serving import ServerLimits

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class RouterHandle:
    """A running router."""

    host: str
    port: int
    picker: Picker
    metrics: RouterMetrics
    _server: grpc.aio.Server | Http2Server
    _front: Front
    _draining: bool = False
    _closed: bool = False

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return _target(self.host, self.port)

    @property
    def front(self) -> Front:
        """The services it offers."""
        return self._front

    async def drain(self, grace: float = 30.0) -> None:
        """Take no new calls and let running ones end within ``grace`` seconds. The picker goes on for the gateway."""
        if not self._draining:
            self._draining = True
            self._front.begin_close()
        await self._server.stop(grace)

    async def close(self, grace: float = 30.0) -> None:
        """Drain, then stop. Twice does nothing more.

        Leases that the gateway still holds keep their channels only until this returns: close it first.
        """
        if self._closed:
            return
        self._closed = True
        await self.drain(grace)
        self.picker.events.close()
        await self.picker.pool.close()

    async def wait_ready(self, seconds: float) -> None:
        """Until each known model has an engine that can take a request; TimeoutError after ``seconds``."""
        changed = asyncio.Event()
        self.picker.pool.listen(changed.set)

        async def ready() -> None:
            while not (models := self.picker.models()) or not all(models.values()):
                changed.clear()
                await changed.wait()

        await asyncio.wait_for(ready(), seconds)


async def serve_router(
    source: EndpointSource,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    policy: str | Policy = DEFAULT_POLICY,
    registry: CollectorRegistry | None = None,
    settings: RouterSettings | None = None,
    reuse_port: bool = False,
    keys: Keys | None = None,
    tls: ServerTls | None = None,
    warm: float = 0.0,
    peers: Peers | None = None,
) -> RouterHandle:
    """Start a router over ``source`` and return it; it serves until its ``close``.

    ``host`` may be ``unix:PATH``; ``port`` 0 takes a free one; ``policy`` is a name of :func:`known_policies`
    or a policy; the Prometheus series go into ``registry`` (a fresh one by default); ``reuse_port`` lets
    several routers share one port. With ``keys`` each call must carry one; with ``tls`` the port speaks nothing
    else. With ``warm`` it listens once each model has an engine that is ready, after that many seconds at the
    latest: a router that shares a port must not take calls that others could answer. ``peers`` are such others.
    OSError where the port cannot be had, ValueError for an unknown policy or TLS files that cannot be used.
    """
    settings = settings or RouterSettings()
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    server = _server(settings, reuse_port=reuse_port)
    if not warm:
        port = await _bind(server, host, port, tls)  # first: nothing is left behind where it fails
    metrics = RouterMetrics(registry if registry is not None else CollectorRegistry())
    pool = EnginePool(source, settings, metrics, peers=peers)
    told = (metrics.on_refused, metrics.on_split, metrics.on_hedge, metrics.on_resume)
    picker = Picker(pool, chosen, settings.admission, *told)
    front = Front(picker, metrics, settings, keys or Keys(()))
    front.add_to(server)
    metrics.watch(pool)
    metrics.registry.register(PrefixCollector(picker))
    await pool.start()
    handle = RouterHandle(host=host, port=port, picker=picker, metrics=metrics, _server=server, _front=front)
    if warm:
        with suppress(TimeoutError):
            await handle.wait_ready(warm)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(handle.close, 0.0)
            handle.port = await _bind(server, host, port, tls)
            undo.pop_all()
    await server.start()
    _log.info("router listens on %s, policy %s", handle.address, chosen.name)
    return handle


def _server(settings: RouterSettings, *, reuse_port: bool) -> grpc.aio.Server | Http2Server:
    if settings.front == "http2":
        limits = ServerLimits(
            max_message_bytes=settings.max_request_bytes,
            max_metadata_bytes=settings.max_metadata_bytes,
            max_calls=settings.max_streams,
        )
        return Http2Server(limits, reuse_port=reuse_port)
    return grpc.aio.server(
        options=server_options(settings, reuse_port=reuse_port), maximum_concurrent_rpcs=settings.max_streams
    )


def server_options(settings: RouterSettings, *, reuse_port: bool) -> list[tuple[str, int]]:
    """gRPC server options of the front: bound what one client can make it hold, notice dead clients."""
    return [
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ]


async def _bind(server: grpc.aio.Server | Http2Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = _target(host, port)
    try:
        if tls is None:
            return server.add_insecure_port(address)
        if isinstance(server, Http2Server):
            return server.add_port(address, tls.context())
        return server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        await server.stop(None)
        raise OSError(f"the router cannot listen on {address}: {error}") from error


def _target(host: str, port: int) -> str:
    return host if host.startswith("unix:") else netloc(host, port)
