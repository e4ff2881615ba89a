"""The calls about engines, health, reflection, and the router's life, with stock stubs."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.router.command import endpoints
from npufleet.cluster.router.health import HealthService
from npufleet.cluster.router.server import serve_router

from .router_fakes import MODEL, FakeEngine, ListSource, endpoint, fleet, generate_request, tokens_of, until

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


def rank(number: int, running: int) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(dp_rank=number, num_running_reqs=running)


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_what_describes_a_model_comes_from_one_engine():
    engines = [FakeEngine(name=n) for n in "ab"]
    async with fleet(*engines) as f:
        info = await f.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.model_path == "a" and info.vocab_size == 50000
        call = f.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=(("x-npufleet-engine", "b"),))
        assert (await call).server_type == "b"
        assert dict(await call.trailing_metadata())["x-npufleet-engine"] == "b"
        assert dict(await call.initial_metadata())["x-features"] == "some of b"
        chunks = [chunk.data async for chunk in f.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert b"".join(chunks) == b"zipbytes"
        error = await refused(
            f.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=(("x-npufleet-engine", "c"),))
        )
        assert error.code() is Code.NOT_FOUND and "a, b" in error.details()


async def test_a_control_call_goes_on_to_the_next_engine_when_one_is_lost():
    engines = [FakeEngine(name=n) for n in "ab"]
    async with fleet(*engines) as f:
        await engines[0].stop()
        assert (await f.stub.GetModelInfo(pb.GetModelInfoRequest())).model_path == "b"


async def test_loads_of_all_engines_in_one_answer():
    engines = [FakeEngine(name="a", loads=[rank(0, 1), rank(1, 2)]), FakeEngine(name="b", loads=[rank(0, 3)])]
    async with fleet(*engines) as f:
        call = f.stub.GetLoads(pb.GetLoadsRequest())
        answer = await call
        assert [(x.dp_rank, x.num_running_reqs) for x in answer.loads] == [(0, 1), (1, 2), (2, 3)]
        assert (answer.dp_rank_count, answer.version) == (3, "fake")
        assert dict(await call.trailing_metadata())["x-npufleet-engines"] == "a=0..1, b=2..2"
        one = await f.stub.GetLoads(pb.GetLoadsRequest(dp_rank=2))
        assert [x.num_running_reqs for x in one.loads] == [3]
        only = await f.stub.GetLoads(pb.GetLoadsRequest(), metadata=(("x-npufleet-engine", "b"),))
        assert [(x.dp_rank, x.num_running_reqs) for x in only.loads] == [(0, 3)]
        await engines[0].stop()
        rest = await f.stub.GetLoads(pb.GetLoadsRequest())
        assert [x.num_running_reqs for x in rest.loads] == [3]


async def test_least_load_follows_the_engines_reports():
    busy = FakeEngine(name="a", loads=[rank(0, 40)])
    idle = FakeEngine(name="b", loads=[rank(0, 0)])
    async with fleet(busy, idle, policy="least-load") as f:
        await until(
            lambda: all(m.ledgers[0].report_age() is not None for m in f.router.picker.pool.members())
        )
        for _ in range(6):
            await tokens_of(f.stub.Generate(generate_request(1)))
        assert f.served() == [0, 6]


async def test_flush_reaches_every_engine_and_success_means_all():
    engines = [FakeEngine(name=n) for n in "abc"]
    async with fleet(*engines) as f:
        answer = await f.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert answer.success and answer.message == "a: flushed; b: flushed; c: flushed"
        engines[1].fail_at = 0
        engines[1].healthy = False
        answer = await f.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not answer.success or len(answer.message.split(";")) == 2  # b may be out already
        assert engines[0].flushed == engines[2].flushed == 2
        error = await refused(f.stub.StartProfile(common_pb2.StartProfileRequest()))
        assert error.code() is Code.UNIMPLEMENTED


async def test_kv_events_are_per_engine():
    engines = [FakeEngine(name="a"), FakeEngine(name="bb")]
    async with fleet(*engines) as f:
        ask = common_pb2.SubscribeKvEventsRequest()
        call = f.stub.SubscribeKvEvents(ask)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is Code.UNIMPLEMENTED and "a, bb" in caught.value.details()
        call = f.stub.SubscribeKvEvents(ask, metadata=(("x-npufleet-engine", "bb"),))
        assert (await call.read()).sequence_number == 2
        closing = asyncio.create_task(f.router.close(grace=60))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is Code.UNAVAILABLE
        await asyncio.wait_for(closing, 20)  # an endless stream must not use up the grace


async def test_health_by_both_protocols_follows_the_engines():
    one, two = await FakeEngine(name="a").start(), await FakeEngine(name="b").start()
    source = ListSource(endpoint(one, model="llama"), endpoint(two, model="qwen"))
    async with fleet(source=source) as f:
        health = health_pb2_grpc.HealthStub(f.channel)

        async def status(service: str = "") -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        for service in ("", "vllm.grpc.engine.VllmEngine", "llama", "qwen"):
            assert await status(service) == Status.SERVING
        assert (await f.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        error = await refused(health.Check(health_pb2.HealthCheckRequest(service="gpt")))
        assert error.code() is Code.NOT_FOUND and "llama, qwen" in error.details()
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        await two.stop()
        assert (await watch.read()).status == Status.NOT_SERVING
        assert await status("llama") == Status.SERVING
        assert await status("qwen") == await status() == Status.NOT_SERVING
        answer = await f.stub.HealthCheck(pb.HealthCheckRequest())
        assert not answer.healthy and "qwen" in answer.message
        mine = f.stub.HealthCheck(pb.HealthCheckRequest(), metadata=(("x-npufleet-model", "llama"),))
        assert (await mine).healthy
        listed = await health.List(health_pb2.HealthListRequest())
        assert listed.statuses["llama"].status == Status.SERVING
    await one.stop()


async def test_reflection_describes_the_engine_service():
    async with fleet(wait=False) as f:
        stub = reflection_pb2_grpc.ServerReflectionStub(f.channel)
        ask = reflection_pb2.ServerReflectionRequest
        asked = [ask(list_services=""), ask(file_containing_symbol="vllm.grpc.engine.VllmEngine")]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= names
        files = answers[1].file_descriptor_response.file_descriptor_proto
        assert pb.DESCRIPTOR.serialized_pb in files


async def test_a_watcher_hears_of_a_close_that_comes_while_a_status_is_sent_to_it():
    health = HealthService(SimpleNamespace(models=lambda: {"tiny": 1}, listen=lambda told: None))
    watch = health.Watch(health_pb2.HealthCheckRequest(), None)
    assert (await anext(watch)).status == Status.SERVING
    health.close()
    assert [answer.status async for answer in watch] == [Status.NOT_SERVING]


async def test_closing_lets_streams_end_and_refuses_new_calls():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine) as f:
        running = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(50))))
        await until(lambda: engine.seen)
        watch = health_pb2_grpc.HealthStub(f.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        closing = asyncio.create_task(f.router.close(grace=60))
        assert (await watch.read()).status == Status.NOT_SERVING
        assert len(await running) == 50
        await asyncio.wait_for(closing, 20)
        error = await refused(f.stub.GetModelInfo(pb.GetModelInfoRequest()))
        assert error.code() is Code.UNAVAILABLE
        await f.router.close()


async def test_a_client_cannot_add_series():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        await tokens_of(f.stub.Generate(generate_request(1)))
        for i in range(20):
            with pytest.raises(grpc.aio.AioRpcError):
                await tokens_of(
                    f.stub.Generate(generate_request(), metadata=(("x-npufleet-model", f"m{i}"),))
                )
        text = generate_latest(f.router.metrics.registry).decode()
        assert 'npufleet_router_engine_state{engine="a",model="tiny",state="ready"} 1.0' in text
        assert 'npufleet_router_first_message_seconds_count{model="tiny"} 1.0' in text
        assert 'npufleet_router_overhead_seconds_count{model="tiny"} 1.0' in text
        assert "m7" not in text
        for line in text.splitlines():
            assert line.startswith(("#", "npufleet_router_"))


async def test_a_taken_port_and_an_unknown_policy_are_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        registry, port = CollectorRegistry(), held.getsockname()[1]
        for _ in range(2):  # a failed start leaves nothing in the registry
            with pytest.raises(OSError, match="cannot listen on 127"):
                await serve_router(ListSource(), port=port, registry=registry)
    router = await serve_router(ListSource(), registry=registry)
    await router.close(0)
    with pytest.raises(ValueError, match="round-robin"):
        await serve_router(ListSource(), policy="fastest")


def test_the_router_needs_neither_torch_nor_vllm_nor_ray():
    program = (
        "import sys, npufleet.cluster.router.__main__\n"
        "sys.exit(bool({'torch', 'torch_npu', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


async def test_it_runs_alone():
    engine = await FakeEngine(name="a").start()
    command = [sys.executable, "-m", "npufleet.cluster.router", "--engine", engine.address, "--model", MODEL]
    process = await asyncio.create_subprocess_exec(
        *command, "--port", "0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await health.read()).status != Status.SERVING:
            pass
        answers = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        assert len([m async for m in answers(generate_request(2).SerializeToString())]) == 3
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    await engine.stop()


def test_the_command_line_says_what_is_wrong():
    made = endpoints(["127.0.0.1:1", "other@127.0.0.1:2", "[::1]:3"], "m")
    assert [(e.model, e.address) for e in made] == [
        ("m", "127.0.0.1:1"),
        ("other", "127.0.0.1:2"),
        ("m", "[::1]:3"),
    ]
    for engines, model, message in [
        (["nowhere"], "m", r"'nowhere' is not \[MODEL@\]\[grpc://\]HOST:PORT"),
        (["h:1"], None, "h:1' has no model"),
        (["h:1", "h:1"], "m", "given twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            endpoints(engines, model)
