"""Links inside a fleet under mutual TLS: the fleet's router reaches its engines, nobody without a certificate does."""

from __future__ import annotations

import grpc
import pytest
from prometheus_client import CollectorRegistry
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.config import RouterConfig, from_dict
from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.engine.service import serve_engine
from npufleet.cluster.router.fleet_router import start_router
from tests.fakes.async_llm import FakeAsyncLLM

from .certificates import Authority
from .router_fakes import ListSource, generate_request, tokens_of


def described(authority: Authority, **router) -> RouterConfig:
    """A router whose links to engines have certificates of ``authority``."""
    pem = authority.sign("npufleet")
    files = {"ca": str(authority.ca), "certificate": str(pem.certificate), "key": str(pem.key)}
    fleet = {"models": [{"name": "m", "source": "/m"}], "router": {"port": 0, "engine_tls": files, **router}}
    return from_dict(fleet).router


async def code_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokens_of(stub.Generate(generate_request(3), timeout=5))
        return refused.value.code()


@pytest.mark.parametrize("settings", [{}, {"transport": "grpcio"}, {"processes": 2}, {"data_plane": "envoy"}])
async def test_links_to_engines_are_mutual_tls(tmp_path, settings):
    authority = Authority(tmp_path)
    config = described(authority, **settings)
    assert config.engine_tls is not None
    engine = await serve_engine(FakeAsyncLLM(), tls=config.engine_tls.engine())
    endpoint = EngineEndpoint(
        engine_id="a", model="m", address=engine.address, metrics_url="", state=EngineState.READY
    )
    try:
        router = await start_router(
            config, lambda: ListSource(endpoint), keys=None, registry=CollectorRegistry()
        )
        try:
            await router.handle.wait_ready(20)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                assert len(await tokens_of(stub.Generate(generate_request(3)))) == 3
        finally:
            await router.close(1.0)
        unavailable = grpc.StatusCode.UNAVAILABLE
        assert await code_of(grpc.aio.insecure_channel(engine.address)) is unavailable
        trusting = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        assert await code_of(grpc.aio.secure_channel(engine.address, trusting)) is unavailable
    finally:
        await engine.stop()


def test_files_that_cannot_be_used_are_named(tmp_path):
    authority = Authority(tmp_path)
    with pytest.raises(ValueError, match=r"router\.engine_tls"):
        described(authority, engine_tls={"ca": "/ca"})
    with pytest.raises(ValueError, match="certificat"):
        described(authority, engine_tls={"ca": "/ca", "certificat": "/c", "key": "/k"})
    missing = described(authority, engine_tls={"ca": "/ca", "certificate": "/c", "key": "/k"}).engine_tls
    assert missing is not None
    with pytest.raises(ValueError, match="TLS files cannot be used"):
        missing.engine()
