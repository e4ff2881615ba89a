"""The router's own defences: keys, rates, queues, objectives, TLS, and engines that come and go by themselves."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.router.base import RequestInfo
from npufleet.cluster.router.server import serve_router
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.sources import DnsSource, FileSource, ToldBySelf, endpoint_of
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

Code = grpc.StatusCode
KEYS = Keys(
    [
        "plain",
        "slow tenant=slow tokens_per_minute=60",
        "boss tenant=boss admin=yes",
        "many tenant=many weight=2",
    ]
)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def error_of(awaitable) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def slots(number: int, **more) -> RouterSettings:
    admission = AdmissionSettings(engine_slots=number, **more)
    return RouterSettings(
        probe_interval=QUICK.probe_interval, recovery_interval=0.05, load_interval=0.1, admission=admission
    )


async def test_a_call_needs_a_good_key_and_engines_never_see_it():
    engine = FakeEngine(name="a")
    async with fleet(engine, keys=KEYS) as f:
        for metadata in ((), bearer("wrong"), (("authorization", "Basic plain"),)):
            error = await error_of(tokens_of(f.stub.Generate(generate_request(2), metadata=metadata)))
            assert error.code() is Code.UNAUTHENTICATED and "plain" not in error.details()
        assert await tokens_of(f.stub.Generate(generate_request(2), metadata=bearer("plain"))) == [6, 7]
        assert len(engine.seen) == 1 and "authorization" not in engine.metadata[0]
        await tokens_of(f.stub.Generate(generate_request(1), metadata=(("x-api-key", "boss"),)))
        assert "x-api-key" not in engine.metadata[1]


async def test_what_changes_engines_is_for_administrators():
    engine = FakeEngine(name="a")
    async with fleet(engine, keys=KEYS) as f:
        flush = common_pb2.FlushCacheRequest()
        assert (
            await error_of(f.stub.FlushCache(flush, metadata=bearer("plain")))
        ).code() is Code.PERMISSION_DENIED
        assert engine.flushed == 0
        assert (await f.stub.FlushCache(flush, metadata=bearer("boss"))).success
        assert (await f.stub.GetLoads(pb.GetLoadsRequest(), metadata=bearer("plain"))) is not None


async def test_a_tenant_beyond_its_rate_is_told_when_to_come_back_and_others_are_served():
    async with fleet(FakeEngine(name="a"), keys=KEYS) as f:
        slow = {"metadata": bearer("slow")}
        await tokens_of(f.stub.Generate(generate_request(30, tuple(range(30))), **slow))  # its whole minute
        error = await error_of(tokens_of(f.stub.Generate(generate_request(1, tuple(range(10))), **slow)))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "60 tokens per minute" in error.details()
        trailing = dict(error.trailing_metadata())
        assert 9 < float(trailing["retry-after"]) < 14 and int(trailing["grpc-retry-pushback-ms"]) > 9000
        await tokens_of(f.stub.Generate(generate_request(30, tuple(range(30))), metadata=bearer("plain")))
        assert f.metric("npufleet_router_refused_total", model=MODEL, reason="rate_limited") == 1
        assert f.metric("npufleet_router_tenant_tokens_total", tenant="slow") == 30


async def test_requests_wait_in_the_router_while_engines_are_full():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine, settings=slots(2)) as f:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, f.router.picker.pool.member("a").ledgers[0].in_flight)
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        calls = [tokens_of(f.stub.Generate(generate_request(5, request_id=f"r{i}"))) for i in range(12)]
        assert [len(tokens) for tokens in await asyncio.gather(*calls)] == [5] * 12
        watching.cancel()
        assert most == 2
        assert f.router.picker.gate.waiting(MODEL) == 0


async def test_a_cancelled_wait_reaches_no_engine_and_a_full_queue_refuses():
    engine = FakeEngine(name="a", delay=60)
    async with fleet(engine, settings=slots(1, max_queue=1)) as f:
        running = f.stub.Generate(generate_request(5, request_id="runs"))
        await until(lambda: len(engine.seen) == 1)
        waiting = f.stub.Generate(generate_request(5, request_id="waits"))
        reading = asyncio.create_task(waiting.read())
        await until(lambda: f.router.picker.gate.waiting(MODEL) == 1)
        error = await error_of(tokens_of(f.stub.Generate(generate_request(5))))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert float(dict(error.trailing_metadata())["retry-after"]) >= 1
        waiting.cancel()
        await until(lambda: f.router.picker.gate.waiting(MODEL) == 0)
        running.cancel()
        await until(lambda: engine.cancelled == ["runs"])
        await asyncio.gather(reading, return_exceptions=True)
        engine.delay = 0
        assert len(await tokens_of(f.stub.Generate(generate_request(2)))) == 2
        assert [request.request_id for request in engine.seen] == ["runs", "r"]


async def test_waiting_requests_learn_that_every_engine_has_gone():
    engine = FakeEngine(name="a", delay=60)
    async with fleet(engine, settings=slots(1)) as f:
        running = f.stub.Generate(generate_request(5))
        await until(lambda: len(engine.seen) == 1)
        waiting = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(5))))
        await until(lambda: f.router.picker.gate.waiting(MODEL) == 1)
        await engine.stop()
        assert (await error_of(waiting)).code() is Code.UNAVAILABLE
        assert (await error_of(tokens_of(running))).code() is Code.UNAVAILABLE


async def test_an_objective_that_cannot_be_met_refuses_with_a_time():
    engine = FakeEngine(name="a", delay=0.05)
    async with fleet(engine, settings=slots(1024, ttft_objective=0.2)) as f:
        for i in range(12):  # teaches the pace
            await tokens_of(f.stub.Generate(generate_request(1, tuple(range(100)), f"t{i}")))
        assert f.router.picker.look(MODEL, RequestInfo(model=MODEL, prompt_tokens=100))[0].pace.known
        engine.delay = 60
        long = tuple(range(60_000))  # above the objective by itself, so an idle engine takes it
        running = f.stub.Generate(generate_request(1, long, "runs"))
        await until(lambda: engine.seen[-1].request_id == "runs")
        error = await error_of(tokens_of(f.stub.Generate(generate_request(1, long, "late"))))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "first token would come in" in error.details()
        assert float(dict(error.trailing_metadata())["retry-after"]) >= 1
        assert f.metric("npufleet_router_refused_total", model=MODEL, reason="overloaded") == 1
        running.cancel()
        await until(lambda: engine.cancelled == ["runs"])
        again = f.stub.Generate(generate_request(1, long, "again"))
        await until(lambda: engine.seen[-1].request_id == "again")
        again.cancel()


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_front_speaks_tls_alone(tmp_path: Path, mutual: bool):
    authority = Authority(tmp_path)
    own, client = authority.sign("router.test"), authority.sign("client.test")
    engine = await FakeEngine(name="a").start()
    tls = ServerTls(
        certificate=str(own.certificate), key=str(own.key), client_ca=str(authority.ca) if mutual else None
    )
    router = await serve_router(ListSource(endpoint(engine)), settings=QUICK, tls=tls)
    await router.wait_ready(10)
    shown = (client.key.read_bytes(), client.certificate.read_bytes()) if mutual else (None, None)
    good = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *shown)
    bare = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", "router.test")]
    async with (
        grpc.aio.secure_channel(router.address, good, options=options) as channel,
        grpc.aio.secure_channel(router.address, bare, options=options) as stranger,
        grpc.aio.insecure_channel(router.address) as plain,
    ):
        assert len(await tokens_of(pb_grpc.VllmEngineStub(channel).Generate(generate_request(2)))) == 2
        unencrypted = pb_grpc.VllmEngineStub(plain).Generate(generate_request(2))
        assert (await error_of(tokens_of(unencrypted))).code() is Code.UNAVAILABLE
        if mutual:
            unknown = pb_grpc.VllmEngineStub(stranger).Generate(generate_request(2))
            assert (await error_of(tokens_of(unknown))).code() is Code.UNAVAILABLE
    await router.close(0)
    await engine.stop()
    with pytest.raises(ValueError, match="TLS files"):
        ServerTls(certificate=str(tmp_path / "none"), key=str(own.key)).check()


async def test_a_file_of_engines_may_change_and_may_be_broken_for_a_while(tmp_path: Path):
    file = tmp_path / "engines"
    file.write_text("127.0.0.1:1\n# two more later\n")
    seen: list[list[str]] = []

    async def follow() -> None:
        async for snapshot in FileSource(file, "m").watch():
            seen.append([endpoint.address for endpoint in snapshot.endpoints])

    task = asyncio.create_task(follow())
    await until(lambda: seen == [["127.0.0.1:1"]])
    file.write_text("nonsense\n")
    await asyncio.sleep(1.2)
    file.write_text("grpc://127.0.0.1:2\nother@grpc://127.0.0.1:3\n")
    await until(lambda: len(seen) == 2)
    assert seen[1] == ["127.0.0.1:2", "127.0.0.1:3"]
    task.cancel()
    with pytest.raises(ValueError, match="cannot be read"):
        FileSource(tmp_path / "absent", "m")


async def test_each_address_of_a_name_is_an_engine():
    async for snapshot in DnsSource("localhost", 7, "m").watch():
        assert "127.0.0.1:7" in [endpoint.address for endpoint in snapshot.endpoints]
        break


async def test_engines_say_themselves_what_they_serve():
    engine = await FakeEngine(name="a").start()
    late = FakeEngine(name="b")
    await late.start()
    await late.stop()
    source = ListSource(endpoint_of(f"grpc://{engine.address}", ""), endpoint_of(late.address, ""))
    seen: list[dict[str, str]] = []

    async def follow() -> None:
        async for snapshot in ToldBySelf(source, "http2").watch():
            seen.append({endpoint.address: endpoint.model for endpoint in snapshot.endpoints})

    task = asyncio.create_task(follow())
    await until(lambda: seen == [{engine.address: MODEL}])
    await late.start()
    await until(lambda: seen[-1] == {engine.address: MODEL, late.address: MODEL})
    source.put(endpoint_of(late.address, ""))
    await until(lambda: seen[-1] == {late.address: MODEL})
    task.cancel()
    for each in (engine, late):
        await each.stop()


async def test_it_routes_from_one_command(tmp_path: Path):
    engine = await FakeEngine(name="a").start()
    keys = tmp_path / "keys"
    keys.write_text("secret tenant=a\n")
    command = ["route", "--engine", f"grpc://{engine.address}", "--port", "0", "--api-keys", str(keys)]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "npufleet.cluster.cli", *command],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        async with asyncio.timeout(20):
            while True:
                try:
                    tokens = await tokens_of(stub.Generate(generate_request(2), metadata=bearer("secret")))
                    break
                except grpc.aio.AioRpcError as error:  # until the engine has told its model
                    assert error.code() is Code.UNAVAILABLE
                    await asyncio.sleep(0.1)
        assert tokens == [6, 7]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    await engine.stop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "one way"),
        (["--engine", "h:1", "--engines-dns", "n:1"], "one way"),
        (["--engine", "nowhere"], "is not"),
        (["--engines-dns", "name"], "not NAME:PORT"),
        (["--engine", "h:1", "--tls-cert", "x"], "together"),
        (["--engine", "h:1", "--tls-client-ca", "x"], "needs --tls-cert"),
        (["--engine", "h:1", "--api-keys", "/absent"], "cannot read /absent"),
        (["--engine", "h:1", "--ttft-objective", "-1"], "ttft_objective"),
    ],
)
def test_a_command_line_that_cannot_be_served_says_why(arguments, text, capsys):
    from npufleet.cluster.router.__main__ import main

    assert main([*arguments, "--port", "0"]) == 2
    assert text in capsys.readouterr().err
