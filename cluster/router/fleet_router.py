"""The router of a fleet's front end as its FleetConfig describes it: our own server, several of them, or Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from npufleet.cluster.admission.tenants import Keys, read_key_file
from npufleet.cluster.config import RouterConfig
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.folder import Folder
from npufleet.cluster.router.envoy.server import EnvoyHandle, serve_envoy
from npufleet.cluster.router.envoy.settings import EnvoySettings
from npufleet.cluster.router.lookaside.tokens import read_secret
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.processes.exporter import on_port, port_of
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.supervisor import RouterProcesses
from npufleet.cluster.router.server import RouterHandle, serve_router
from npufleet.cluster.router.settings import RouterSettings, front_of


@dataclass(kw_only=True, eq=False)
class FleetRouter:
    """A running router; its picker is the gateway's too."""

    handle: RouterHandle | EnvoyHandle
    exporter: web.AppRunner | None  # of the series of further processes
    _further: RouterProcesses | None
    _parts: AsyncExitStack

    @property
    def picker(self) -> Picker:
        """What chooses in this process."""
        return self.handle.picker

    @property
    def port(self) -> int:
        """The port that gRPC clients connect to."""
        return self.handle.port

    @property
    def metrics_port(self) -> int | None:
        """Where the series of further processes are, None without any."""
        return None if self.exporter is None else port_of(self.exporter)

    async def drain(self, grace: float = 30.0) -> None:
        """As :meth:`RouterHandle.drain`, of all processes at once: none takes calls while another one drains."""
        further = [] if self._further is None else [self._further.close(grace)]
        await asyncio.gather(self.handle.drain(grace), *further)

    async def close(self, grace: float = 30.0) -> None:
        """As :meth:`RouterHandle.close`, for all of it."""
        await self.drain(grace)
        await self.handle.close(0.0)
        await self._parts.aclose()


async def start_router(
    config: RouterConfig,
    source: Callable[[], EndpointSource],
    *,
    keys: str | None,
    registry: CollectorRegistry,
    metrics_host: str = "127.0.0.1",
    warm: float = 0.0,
) -> FleetRouter:
    """Start the router that ``config`` describes; ``source()`` makes one that may be followed once.

    ``keys`` is a file of API keys, ``metrics_host`` where further processes' series are served; for ``warm`` see
    :func:`serve_router`. Other front ends of this machine may have the port too.
    OSError where a port cannot be had, ValueError for files that cannot be read.
    """
    settings = RouterSettings(
        transport=config.transport,
        tls=None if config.engine_tls is None else config.engine_tls.router(),
        admission=config.admission,
        split_tokens=config.split_tokens,
        hedging=config.hedging,
        resume=config.resume,
        access_log=config.access_log,
        otlp_endpoint=config.otlp_endpoint,
        secret=None if config.secret is None else read_secret(config.secret),
        front=front_of(config.data_plane),
    )
    known = Keys(read_key_file(keys, "router.api_keys"))
    async with AsyncExitStack() as parts:
        exporter = further = None
        if config.data_plane == "envoy":
            folder = Folder("npufleet-envoys-")
            parts.callback(folder.close)
            asked = EnvoySettings(
                folder=folder.path,
                host=config.host,
                port=config.port,
                router=settings,
                tls=config.tls,
                workers=config.processes,
            )
            handle = await serve_envoy(
                source(), asked, policy=config.policy, registry=registry, keys=known, warm=warm
            )
            return FleetRouter(handle=handle, exporter=None, _further=None, _parts=parts.pop_all())
        port, peers = config.port, None
        if config.processes > 1:
            further = RouterProcesses(source(), _setup(config, keys, warm), config.processes - 1, first=1)
            await further.start()
            parts.push_async_callback(further.close)
            port, peers = further.port, further.table
            exporter = await on_port(metrics_host, 0, further.metrics)
            parts.push_async_callback(exporter.cleanup)
        own = await serve_router(
            source(),
            host=config.host,
            port=port,
            policy=config.policy,
            settings=settings,
            keys=known,
            tls=config.tls,
            registry=registry,
            reuse_port=True,
            warm=warm,
            peers=peers,
        )
        return FleetRouter(handle=own, exporter=exporter, _further=further, _parts=parts.pop_all())


def _setup(config: RouterConfig, keys: str | None, warm: float) -> Setup:
    return Setup(
        host=config.host,
        port=config.port,
        policy=config.policy,
        warm=warm,
        transport=config.transport,
        admission=config.admission,
        split_tokens=config.split_tokens,
        hedging=config.hedging,
        resume=config.resume,
        access_log=config.access_log,
        otlp_endpoint=config.otlp_endpoint,
        keys=keys,
        secret=config.secret,
        tls=config.tls,
        engine_tls=None if config.engine_tls is None else config.engine_tls.router(),
        front=front_of(config.data_plane),
    )
