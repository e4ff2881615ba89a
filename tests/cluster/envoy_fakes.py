"""Fake engines behind a real Envoy and our picker."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.router.envoy.server import EnvoyHandle, serve_envoy
from npufleet.cluster.router.envoy.settings import EnvoySettings, Filter
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.tls import ServerTls

from .router_fakes import QUICK, FakeEngine, ListSource, endpoint, until


@dataclass(eq=False)
class EnvoyFleet:
    """Running fakes behind Envoy, with a stock stub."""

    engines: list[FakeEngine]
    source: ListSource
    router: EnvoyHandle
    channel: grpc.aio.Channel
    stub: vllm_engine_pb2_grpc.VllmEngineStub
    folder: Path

    def served(self) -> list[int]:
        return [len(engine.seen) for engine in self.engines]

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def envoy_fleet(
    *engines: FakeEngine,
    filter: Filter = Filter.EXT_AUTHZ,
    settings: RouterSettings = QUICK,
    policy: str = "round-robin",
    source: ListSource | None = None,
    keys: Keys | None = None,
    tls: ServerTls | None = None,
    picker_timeout: float = 5.0,
) -> AsyncIterator[EnvoyFleet]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            if engine.server is None:
                await engine.start()
                stack.push_async_callback(engine.stop)
        source = source or ListSource(*map(endpoint, engines))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npufleet-envoy-")))
        asked = EnvoySettings(
            folder=folder, port=0, router=settings, filter=filter, picker_timeout=picker_timeout, tls=tls
        )
        router = await serve_envoy(source, asked, policy=policy, keys=keys)
        stack.push_async_callback(router.close, 1.0)
        channel = grpc.aio.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)])
        stack.push_async_callback(channel.close)
        await router.wait_ready(10)
        await until(lambda: all(m.pickable for m in router.picker.pool.members()))
        yield EnvoyFleet(
            list(engines), source, router, channel, vllm_engine_pb2_grpc.VllmEngineStub(channel), folder
        )
