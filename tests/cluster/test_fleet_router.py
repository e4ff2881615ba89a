"""The router as a FleetConfig describes it: Envoy as its data plane, several processes on its port."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import grpc
import pytest
from prometheus_client import CollectorRegistry
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster import config
from npufleet.cluster.router.fleet_router import FleetRouter, start_router

from .router_fakes import FakeEngine, ListSource, endpoint, generate_request, tokens_of


def described(**router):
    fleet = {"models": [{"name": "m", "source": "/m"}], "router": {"policy": "round-robin", **router}}
    return config.from_dict(fleet).router


async def first_answer(stub) -> list[int]:
    """Asked for again as long as the process that has the call has not reached the engine: each reaches it itself."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await tokens_of(stub.Generate(generate_request(2)))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"data_plane": "envoy"},
        {"processes": 2},
        {},
        {"data_plane": "http2"},
        {"data_plane": "http2", "processes": 2},
    ],
)
async def test_it_is_started_as_described(settings):
    engine = await FakeEngine(name="a").start()
    registry = CollectorRegistry()
    try:
        router = await start_router(
            described(port=0, **settings), lambda: ListSource(endpoint(engine)), keys=None, registry=registry
        )
        try:
            await router.handle.wait_ready(20)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                assert await first_answer(stub) == [6, 7]
            if settings.get("processes"):
                url = f"http://127.0.0.1:{router.metrics_port}/metrics"
                async with aiohttp.ClientSession() as session, session.get(url) as answer:
                    assert 'process="1"' in await answer.text()
            else:
                assert router.metrics_port is None
        finally:
            await router.close(1.0)
    finally:
        await engine.stop()


async def test_no_process_takes_calls_while_another_one_drains():
    both = asyncio.Barrier(2)

    class Draining:
        async def drain(self, grace):
            await both.wait()

        async def close(self, grace):
            if grace:
                await both.wait()

    made = FleetRouter(handle=Draining(), exporter=None, _further=Draining(), _parts=AsyncExitStack())
    async with asyncio.timeout(10):
        await made.drain(30.0)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match=r"data_plane: expected one of envoy, grpcio, http2"):
        described(data_plane="nginx")
    with pytest.raises(ValueError, match="processes"):
        described(processes=0)
