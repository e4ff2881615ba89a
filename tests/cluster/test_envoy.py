"""Envoy before the router: our decisions, Envoy's bytes. Skipped where the Envoy binary is not installed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.envoy.process import find_envoy
from npufleet.cluster.envoy.start import serve_envoy
from npufleet.cluster.tls import ServerTls

from .certificates import Authority
from .router_fakes import (
    MODEL,
    QUICK,
    FakeEngine,
    ListSource,
    endpoint,
    fleet,
    generate_request,
    tokens_of,
    until,
)

try:
    find_envoy()
except ValueError as missing:
    pytest.skip(str(missing), allow_module_level=True)

Code = grpc.StatusCode
HOT = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def enveloped(*engines: FakeEngine, tls=None, keys=None, **more):
    async with fleet(*engines, keys=keys, **more) as f:
        front = await serve_envoy(f.router, tls=tls, keys=keys)
        try:
            if tls is None:
                async with grpc.aio.insecure_channel(front.address, options=HOT) as channel:
                    yield f, front, pb_grpc.VllmEngineStub(channel)
            else:
                yield f, front, None
        finally:
            await front.envoy.close(0)


async def error_of(awaitable) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def in_flight(f) -> int:
    return sum(member.ledger.in_flight for member in f.router.picker.pool.members())


async def test_the_engines_own_bytes_and_metadata_come_through_and_leases_end():
    engines = [FakeEngine(name=name) for name in "ab"]
    async with enveloped(*engines) as (f, front, stub):
        for i in range(20):
            call = stub.Generate(generate_request(5, (i, 1)), metadata=(("x-a-bin", b"\0\xff"),))
            assert await tokens_of(call) == [i + 1 + k for k in range(5)]
            assert dict(await call.trailing_metadata())["x-fake-done"] == "5"
        assert f.served() == [10, 10]  # round robin: it is our picker that chose
        assert engines[0].metadata[0]["x-a-bin"] == b"\0\xff"
        embedded = await stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2])))
        assert list(embedded.embedding) == [2.0]
        await until(lambda: front.picker.running == 0 and in_flight(f) == 0)
        labels = {"model": MODEL, "method": "Generate", "outcome": "ok", "code": "OK"}
        assert f.metric("npufleet_router_requests_total", **labels) == 20
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy  # of the router itself
        assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success


async def test_a_client_cannot_choose_the_destination():
    here, there = FakeEngine(name="a"), await FakeEngine(name="elsewhere").start()
    async with enveloped(here) as (_, front, stub):
        chosen = (
            ("x-npufleet-destination", there.address),
            ("x-npufleet-cluster", "router"),
            ("x-npufleet-lease", "99"),
        )
        assert len(await tokens_of(stub.Generate(generate_request(2), metadata=chosen))) == 2
        assert len(here.seen) == 1 and not there.seen
        front.picker.close()  # nobody decides, so nobody goes anywhere
        error = await error_of(tokens_of(stub.Generate(generate_request(2), metadata=chosen)))
        assert error.code() is Code.UNAVAILABLE
        assert len(here.seen) == 1 and not there.seen
    await there.stop()


async def test_refusals_keep_their_status_and_their_time():
    settings = replace(QUICK, admission=AdmissionSettings(engine_slots=1, max_queue=1))
    engine = FakeEngine(name="a", delay=60)
    keys = Keys(["good tenant=t"])
    async with enveloped(engine, settings=settings, keys=keys) as (f, _, stub):
        own = {"metadata": (("authorization", "Bearer good"),)}
        error = await error_of(tokens_of(stub.Generate(generate_request(1))))
        assert error.code() is Code.UNAUTHENTICATED and "API key" in error.details()
        wrong = (*own["metadata"], ("x-npufleet-model", "none"))
        assert (
            await error_of(tokens_of(stub.Generate(generate_request(1), metadata=wrong)))
        ).code() is Code.NOT_FOUND
        running = [stub.Generate(generate_request(1, request_id=f"r{i}"), **own) for i in range(2)]
        await until(lambda: len(engine.seen) == 1 and f.router.picker.gate.waiting(MODEL) == 1)
        assert "authorization" not in engine.metadata[0]
        full = await error_of(tokens_of(stub.Generate(generate_request(1), **own)))
        assert full.code() is Code.RESOURCE_EXHAUSTED
        assert float(dict(full.trailing_metadata() or full.initial_metadata())["retry-after"]) >= 1
        for call in running:
            call.cancel()
        await until(lambda: engine.cancelled == ["r0"] or engine.cancelled == ["r1"])
        await until(lambda: in_flight(f) == 0 and f.router.picker.gate.waiting(MODEL) == 0)


async def test_garbage_is_refused_as_the_clients_fault():
    engine = FakeEngine(name="a")
    async with enveloped(engine) as (_, front, _):
        async with grpc.aio.insecure_channel(front.address, options=HOT) as channel:
            call = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff\xff")
            assert (await error_of(call.read())).code() is Code.INVALID_ARGUMENT
        assert not engine.seen


async def test_engines_come_and_go_and_a_deadline_reaches_them():
    one, two = FakeEngine(name="a"), await FakeEngine(name="b").start()
    source = ListSource()
    await one.start()
    source.put(endpoint(one))
    async with enveloped(one, source=source) as (f, _, stub):
        await tokens_of(stub.Generate(generate_request(1)))
        source.put(endpoint(two))
        await until(lambda: f.router.picker.models() == {MODEL: 1} and f.router.picker.pool.member("b"))
        async with asyncio.timeout(10):
            while not two.seen:
                try:
                    await tokens_of(stub.Generate(generate_request(1)))
                except grpc.aio.AioRpcError as error:  # until Envoy has read its new file
                    assert error.code() is Code.UNAVAILABLE
                    await asyncio.sleep(0.02)
        two.delay = 60
        error = await error_of(tokens_of(stub.Generate(generate_request(1), timeout=0.3)))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: two.cancelled)
        await until(lambda: in_flight(f) == 0)
    for each in (one, two):
        await each.stop()


async def test_envoy_is_started_again_and_its_calls_are_forgotten():
    engine = FakeEngine(name="a", delay=60)
    async with enveloped(engine) as (f, front, stub):
        call = stub.Generate(generate_request(1))
        await until(lambda: len(engine.seen) == 1 and in_flight(f) == 1)
        os.kill(front.envoy._process.pid, signal.SIGKILL)
        assert (await error_of(tokens_of(call))).code() is Code.UNAVAILABLE
        await until(lambda: in_flight(f) == 0)
        engine.delay = 0
        assert len(await tokens_of(stub.Generate(generate_request(2), wait_for_ready=True, timeout=20))) == 2


async def test_tls_at_the_door(tmp_path: Path):
    authority = Authority(tmp_path)
    own, client = authority.sign("router.test"), authority.sign("client.test")
    tls = ServerTls(certificate=str(own.certificate), key=str(own.key), client_ca=str(authority.ca))
    async with enveloped(FakeEngine(name="a"), tls=tls) as (_, front, _):
        shown = (client.key.read_bytes(), client.certificate.read_bytes())
        options = [("grpc.ssl_target_name_override", "router.test"), *HOT]
        for pair, allowed in ((shown, True), ((None, None), False)):
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
            async with grpc.aio.secure_channel(front.address, credentials, options=options) as channel:
                call = pb_grpc.VllmEngineStub(channel).Generate(generate_request(2))
                if allowed:
                    assert len(await tokens_of(call)) == 2
                else:
                    assert (await error_of(tokens_of(call))).code() is Code.UNAVAILABLE
