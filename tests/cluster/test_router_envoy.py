"""A real Envoy before fake engines: it carries what our picker decides, and nothing that it did not decide."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.router.envoy import engines
from npufleet.cluster.router.envoy.server import serve_envoy
from npufleet.cluster.router.envoy.settings import EnvoySettings, Filter
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.base import Tls

from .certificates import Authority
from .envoy_fakes import envoy_fleet
from .router_fakes import MODEL, QUICK, FakeEngine, ListSource, endpoint, generate_request, tokens_of, until

Code = grpc.StatusCode


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(call)
    return caught.value


async def rest_of(call) -> list[int]:
    """The tokens that are still to come on a stream whose reading has begun."""
    tokens = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        tokens += answer.chunk.token_ids
    return tokens


async def end_of(call) -> grpc.StatusCode:
    with suppress(grpc.aio.AioRpcError):
        await rest_of(call)
    return await call.code()


async def test_answers_are_the_engines_own_and_the_policy_decides():
    engines = [FakeEngine(name="a"), FakeEngine(name="b")]
    async with envoy_fleet(*engines) as f:
        for _ in range(4):
            call = f.stub.Generate(generate_request(5, (7,)), metadata=(("x-mine", "1"),))
            assert await tokens_of(call) == [7, 8, 9, 10, 11]
            trailing = dict(await call.trailing_metadata())
            assert trailing["x-fake-done"] == "5"
            assert trailing["x-npufleet-engine"] == dict(await call.initial_metadata())["x-fake"]
        assert f.served() == [2, 2]
        assert engines[0].metadata[0]["x-mine"] == "1"
        await until(lambda: len(f.router.away) == 0)
        labels = {"model": MODEL, "method": "Generate", "outcome": "ok", "code": "OK"}
        assert f.metric("npufleet_router_requests_total", **labels) == 4
        assert f.metric("npufleet_router_first_message_seconds_count", model=MODEL) == 4
        assert f.metric("npufleet_router_in_flight", model=MODEL) == 0
        series = (await f.router.series()).decode()
        assert "envoy_cluster_upstream_rq_total" in series and "npufleet_router_picks_total" in series


async def test_a_forged_destination_is_ignored():
    inside, outside = FakeEngine(name="a"), await FakeEngine(name="outside").start()
    try:
        async with envoy_fleet(inside) as f:
            forged = (
                ("x-gateway-destination-endpoint", outside.address),
                ("x-npufleet-pick", "0" * 16),
                ("x-npufleet-token", "forged"),
            )
            assert await tokens_of(f.stub.Generate(generate_request(2), metadata=forged)) == [6, 7]
            assert len(inside.seen) == 1 and not outside.seen
            assert inside.metadata[0]["x-gateway-destination-endpoint"] == inside.address
            assert inside.metadata[0]["x-npufleet-pick"] != "0" * 16
            assert "x-npufleet-token" not in inside.metadata[0]
    finally:
        await outside.stop()


async def test_only_engines_of_the_registry_are_reached_whatever_the_picker_says():
    inside, outside = FakeEngine(name="a"), await FakeEngine(name="outside").start()
    try:
        async with envoy_fleet(inside) as f:
            f.source.put(endpoint(inside), endpoint(outside))
            await until(lambda: len(f.router.picker.pool.pickable(MODEL)) == 2)
            listed = f.folder / "engines" / "engines.json"
            await until(lambda: str(outside.port) in listed.read_text())
            f.source.put(endpoint(inside))
            await until(lambda: str(outside.port) not in listed.read_text())
            f.router.asked.engines._resolved["a"] = (inside.address, ("127.0.0.1", outside.port))
            error = await error_of(f.stub.Generate(generate_request(2)))
            assert error.code() is Code.UNAVAILABLE
            assert not outside.seen and not inside.seen
    finally:
        await outside.stop()


async def test_a_retry_never_goes_to_an_engine_of_another_model():
    mine = FakeEngine(name="a", fail_at=0, fail_code=Code.UNAVAILABLE, greets=False)
    other = FakeEngine(name="b")
    await mine.start()
    await other.start()
    source = ListSource(endpoint(mine), endpoint(other, model="other"))
    try:
        async with envoy_fleet(mine, other, source=source) as f:
            error = await error_of(
                f.stub.Generate(generate_request(2), metadata=(("x-npufleet-model", MODEL),))
            )
            assert error.code() is Code.UNAVAILABLE
            assert mine.seen and not other.seen
            call = f.stub.Generate(generate_request(2), metadata=(("x-npufleet-model", "other"),))
            assert await tokens_of(call) == [6, 7]
    finally:
        await mine.stop()
        await other.stop()


async def test_what_the_picker_refuses_is_told_to_the_client():
    async with envoy_fleet(FakeEngine(name="a")) as f:
        unknown = await error_of(
            f.stub.Generate(generate_request(), metadata=(("x-npufleet-model", "b%\n"[:2]),))
        )
        assert unknown.code() is Code.NOT_FOUND and "there is: 'tiny'" in unknown.details()
        garbage = f.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await garbage.read()
        assert caught.value.code() is Code.INVALID_ARGUMENT
        f.source.put()
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        nobody = await error_of(f.stub.Generate(generate_request()))
        assert nobody.code() is Code.UNAVAILABLE and "no engine of model" in nobody.details()
        told = {**dict(nobody.initial_metadata()), **dict(nobody.trailing_metadata())}
        assert told["retry-after"] == "1"


async def test_what_is_envoys_own_is_not_offered_to_clients():
    async with envoy_fleet(FakeEngine(name="a")) as f:
        for path in (
            "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            "/started/0",
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await f.channel.unary_unary(path)(b"")
            assert caught.value.code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("slow", [False, True])
async def test_without_the_picker_requests_end_with_unavailable(slow: bool):
    engine = FakeEngine(name="a")
    soon = replace(QUICK, admission=AdmissionSettings(queue_timeout=0.1))
    async with envoy_fleet(engine, picker_timeout=0.3, settings=soon) as f:
        assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]
        if slow:
            f.router.asked.place = lambda *a: asyncio.sleep(60)
        else:
            await f.router.authz.close()
        forged = (("x-gateway-destination-endpoint", engine.address),)
        for metadata in ((), forged):
            error = await error_of(f.stub.Generate(generate_request(1), metadata=metadata))
            assert error.code() is Code.UNAVAILABLE
        assert len(engine.seen) == 1


@pytest.mark.parametrize("read_first", [False, True])
async def test_a_cancel_reaches_the_engine_in_its_silence(read_first: bool):
    engine = FakeEngine(name="a", delay=0.01 if read_first else 60)
    async with envoy_fleet(engine) as f:
        call = f.stub.Generate(generate_request(10_000))
        if read_first:
            await call.read()
            engine.delay = 60
        else:
            await until(lambda: engine.seen)
        call.cancel()
        await until(lambda: engine.cancelled == ["r"])
        await until(lambda: not len(f.router.away))
        assert f.router.picker.pool.member("a").in_flight == 0
        assert f.router.picker.models() == {MODEL: 1}
        labels = {"model": MODEL, "method": "Generate", "outcome": "cancelled", "code": "CANCELLED"}
        assert f.metric("npufleet_router_requests_total", **labels) == 1


async def test_the_clients_deadline_reaches_the_engine_and_ends_the_call():
    engine = FakeEngine(name="a", delay=30)
    async with envoy_fleet(engine) as f:
        error = await error_of(f.stub.Generate(generate_request(), timeout=0.5))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert engine.time_left[0] is not None and engine.time_left[0] < 0.6
        await until(lambda: engine.cancelled == ["r"])
        await until(lambda: f.router.picker.pool.member("a").in_flight == 0)
        assert f.router.picker.models() == {MODEL: 1}


async def test_a_call_without_deadline_gets_the_routers():
    engine = FakeEngine(name="a", delay=30, greets=False)
    async with envoy_fleet(engine, settings=replace(QUICK, request_timeout=0.4)) as f:
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: engine.cancelled == ["r"])


async def test_an_engines_status_passes_as_it_is():
    engine = FakeEngine(name="a", fail_at=2, fail_code=Code.FAILED_PRECONDITION)
    async with envoy_fleet(engine) as f:
        for fail_at in (0, 2):
            engine.fail_at = fail_at
            error = await error_of(f.stub.Generate(generate_request(5)))
            assert (error.code(), error.details()) == (Code.FAILED_PRECONDITION, "fake failure of a")
        assert f.router.picker.models() == {MODEL: 1}


async def test_the_last_engines_refusal_stands():
    engine = FakeEngine(name="a", fail_at=0, fail_code=Code.RESOURCE_EXHAUSTED, greets=False)
    async with envoy_fleet(engine) as f:
        error = await error_of(f.stub.Generate(generate_request(5), metadata=(("x-envoy-max-retries", "9"),)))
        assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "fake failure of a")
        assert len(engine.seen) == 1


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
async def test_an_engine_that_refuses_is_passed_over(code: grpc.StatusCode):
    bad, good = FakeEngine(name="a", fail_at=0, fail_code=code, greets=False), FakeEngine(name="b")
    async with envoy_fleet(bad, good) as f:
        for _ in range(4):
            call = f.stub.Generate(generate_request(3))
            assert await tokens_of(call) == [6, 7, 8]
            assert dict(await call.trailing_metadata())["x-npufleet-engine"] == "b"
        assert bad.seen and len(good.seen) == 4
        await until(lambda: not len(f.router.away))
        assert f.metric("npufleet_router_retries_total", model=MODEL, code="INTERNAL") == len(bad.seen)


async def test_an_engine_that_dies_ends_its_streams_and_gets_no_new_ones():
    engines = [FakeEngine(name="a", delay=0.05), FakeEngine(name="b", delay=0.01)]
    async with envoy_fleet(*engines) as f:
        calls = [f.stub.Generate(generate_request(60)) for _ in range(2)]
        for call in calls:
            await call.read()
        assert f.served() == [1, 1]
        await engines[0].stop()
        ends = [await end_of(call) for call in calls]
        assert sorted(ends, key=str) == [Code.OK, Code.UNAVAILABLE]
        for _ in range(4):
            assert len(await tokens_of(f.stub.Generate(generate_request(2)))) == 2
        assert len(engines[1].seen) == 5
        await engines[0].start()  # on the same port
        await until(lambda: f.router.picker.models() == {MODEL: 2})
        for _ in range(2):
            assert len(await tokens_of(f.stub.Generate(generate_request(2)))) == 2
        assert len(engines[0].seen) > 1


async def test_engines_come_and_go_without_a_restart():
    first, second = FakeEngine(name="a", delay=0.02), await FakeEngine(name="b").start()
    try:
        async with envoy_fleet(first) as f:
            pid = f.router.envoy.pid
            running = f.stub.Generate(generate_request(50))
            await running.read()
            f.source.put(endpoint(second))
            await until(lambda: [m.engine_id for m in f.router.picker.pool.pickable(MODEL)] == ["b"])
            for _ in range(3):
                assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]
            assert len(second.seen) == 3
            assert len(await rest_of(running)) == 49  # its engine has left, it goes on
            assert f.router.envoy.pid == pid
    finally:
        await second.stop()


async def test_a_prompt_of_megabytes_and_a_compressed_one():
    engine = FakeEngine(name="a")
    async with envoy_fleet(engine) as f:
        prompt = tuple(range(100_000, 500_000))
        assert len(await tokens_of(f.stub.Generate(generate_request(1, prompt)))) == 1
        call = f.stub.Generate(generate_request(1, prompt), compression=grpc.Compression.Gzip)
        assert len(await tokens_of(call)) == 1
        assert [len(seen.tokenized.input_ids) for seen in engine.seen] == [400_000] * 2


async def test_embed_goes_the_same_way():
    async with envoy_fleet(FakeEngine(name="a")) as f:
        answer = await f.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2])))
        assert list(answer.embedding) == [2.0]


async def test_everything_else_is_answered_by_the_front():
    engines = [FakeEngine(name="a", delay=0.02), FakeEngine(name="b")]
    async with envoy_fleet(*engines) as f:
        assert (await f.stub.GetModelInfo(pb.GetModelInfoRequest())).served_model_name == MODEL
        assert (await f.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        health = health_pb2_grpc.HealthStub(f.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        call = f.stub.Generate(generate_request(5000, request_id="mine"))
        await call.read()
        await f.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        while not (answer := await call.read()).HasField("complete"):
            pass
        assert answer.complete.finish_reason == "abort"


async def test_a_stop_lets_running_streams_end():
    engine = FakeEngine(name="a", delay=0.02)
    async with envoy_fleet(engine) as f:
        call = f.stub.Generate(generate_request(50))
        await call.read()
        closing = asyncio.create_task(f.router.close(20))
        assert len(await rest_of(call)) == 49
        await closing
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.UNAVAILABLE


async def test_an_envoy_that_dies_is_started_again():
    engine = FakeEngine(name="a", delay=60)
    async with envoy_fleet(engine) as f:
        running = f.stub.Generate(generate_request(2))
        await until(lambda: engine.seen)
        engine.delay = 0
        pid = f.router.envoy.pid
        os.kill(pid, signal.SIGKILL)
        assert (await error_of(running)).code() is Code.UNAVAILABLE
        await until(lambda: not len(f.router.away))
        await until(lambda: f.router.envoy.pid not in (None, pid), 20)
        call = f.stub.Generate(generate_request(2), wait_for_ready=True, timeout=20)
        assert await tokens_of(call) == [6, 7]


async def test_an_envoy_that_cannot_start_says_why(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = EnvoySettings(folder=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(OSError, match=r"Envoy ended while it started.*Address already in use"):
            await serve_envoy(ListSource(), settings)
    with pytest.raises(ValueError, match="not a program"):
        await serve_envoy(ListSource(), EnvoySettings(folder=tmp_path, binary=str(tmp_path)[:3] + "nowhere"))


async def test_admission_and_keys_hold_before_envoy_too():
    settings = replace(QUICK, admission=AdmissionSettings(engine_slots=1, max_queue=1))
    engine = FakeEngine(name="a", delay=60)
    async with envoy_fleet(engine, settings=settings, keys=Keys(["good tenant=t"])) as f:
        own = {"metadata": (("authorization", "Bearer good"),)}
        stranger = await error_of(f.stub.Generate(generate_request(1)))
        assert stranger.code() is Code.UNAUTHENTICATED and "API key" in stranger.details()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await f.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is Code.UNAUTHENTICATED
        running = [f.stub.Generate(generate_request(1, request_id=f"r{i}"), **own) for i in range(2)]
        gate = f.router.picker.gate
        await until(lambda: len(engine.seen) == 1 and gate.waiting(MODEL) == 1)
        assert "authorization" not in engine.metadata[0]
        full = await error_of(f.stub.Generate(generate_request(1), **own))
        assert full.code() is Code.RESOURCE_EXHAUSTED
        for call in running:
            call.cancel()
        await until(lambda: engine.cancelled and not gate.waiting(MODEL) and not len(f.router.away))
        assert f.router.picker.pool.member("a").in_flight == 0


async def test_tls_at_the_door_and_towards_engines(tmp_path: Path):
    authority = Authority(tmp_path)
    own, client = authority.sign("router.test"), authority.sign("client.test")
    door = ServerTls(certificate=str(own.certificate), key=str(own.key), client_ca=str(authority.ca))
    there = authority.sign("engine.test")
    engine = FakeEngine(name="a", credentials=(authority.ca, there.certificate, there.key, True))
    link = Tls(ca=authority.ca, certificate=client.certificate, key=client.key, server_name="engine.test")
    async with envoy_fleet(engine, settings=replace(QUICK, tls=link), tls=door) as f:
        shown = (client.key.read_bytes(), client.certificate.read_bytes())
        options = [("grpc.ssl_target_name_override", "router.test"), ("grpc.use_local_subchannel_pool", 1)]
        for pair, allowed in ((shown, True), ((None, None), False)):
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
            async with grpc.aio.secure_channel(f.router.address, credentials, options=options) as channel:
                call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(generate_request(2))
                if allowed:
                    assert await tokens_of(call) == [6, 7]
                else:
                    assert (await error_of(call)).code() is Code.UNAVAILABLE


@pytest.mark.parametrize("filter", list(Filter))
async def test_what_is_too_large_is_said_to_be(filter: Filter):
    engine = FakeEngine(name="a", options=(("grpc.absolute_max_metadata_size", 16 << 10),))
    async with envoy_fleet(engine, filter=filter, settings=replace(QUICK, max_request_bytes=100_000)) as f:
        assert len(await tokens_of(f.stub.Generate(generate_request(1, (1,) * 90_000)))) == 1
        for call in (
            f.stub.Generate(generate_request(1, (1,) * 110_000)),
            f.stub.Generate(generate_request(1), metadata=(("x-mine", "y" * 30_000),)),
        ):
            error = await error_of(call)
            assert error.code() is Code.RESOURCE_EXHAUSTED, error.details()
        assert len(engine.seen) == 1


async def test_an_engine_that_is_known_by_a_name_is_found_where_the_name_leads(monkeypatch):
    engine = await FakeEngine(name="a").start()
    named = replace(endpoint(engine), address=f"localhost:{engine.port}")
    try:
        async with envoy_fleet(source=ListSource(named)) as f:
            assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]
            assert f.router.asked.engines.get("a") == ("127.0.0.1", engine.port)
            monkeypatch.setattr(engines, "resolve", _moved)
            f.router.asked.engines._changed.set()  # as twice a minute
            listed = f.folder / "engines" / "engines.json"
            await until(lambda: "127.0.0.2" in listed.read_text())
    finally:
        await engine.stop()


async def _moved(address: str) -> tuple[str, int]:
    return "127.0.0.2", engines.split(address)[1]
