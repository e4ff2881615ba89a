"""Engines that die, freeze, come back, drain and leave: the others' requests never notice."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.router.picker import NoEngine, RequestInfo
from npufleet.cluster.router.settings import RouterSettings

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
PROGRAM = Path(__file__).with_name("router_fakes.py")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@asynccontextmanager
async def engine_process(port: int, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(port), name, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def at(port: int, name: str) -> EngineEndpoint:
    return EngineEndpoint(
        engine_id=name, model=MODEL, address=f"127.0.0.1:{port}", metrics_url="", state=EngineState.READY
    )


async def stream(stub, begun: list[str]) -> tuple[str, int]:
    """Which engine served a stream of 60 and how many tokens came; ``begun`` notes it at the first."""
    call, got = stub.Generate(generate_request(60)), 0
    try:
        while (answer := await call.read()) is not grpc.aio.EOF:
            got += len(answer.chunk.token_ids)
            if got == 1:
                begun.append(dict(await call.initial_metadata())["x-fake"])
    except grpc.aio.AioRpcError as error:
        assert error.code() is Code.UNAVAILABLE and got, "only a stream that had begun may fail"
        assert "'doomed' was lost after" in error.details()
    return dict(await call.initial_metadata())["x-fake"], got


async def test_a_killed_engine_under_load_hurts_only_its_own_streams_and_comes_back():
    port, good = free_port(), await FakeEngine(name="good", delay=0.005).start()
    source = ListSource(at(port, "doomed"), endpoint(good))
    async with fleet(good, source=source, wait=False) as f:
        async with engine_process(port, "doomed") as process:
            await until(lambda: f.router.picker.models() == {MODEL: 2}, 30)
            begun: list[str] = []
            running = [asyncio.create_task(stream(f.stub, begun)) for _ in range(12)]
            await until(lambda: len(begun) == 12)
            process.kill()
            for _ in range(40):
                running.append(asyncio.create_task(stream(f.stub, [])))
                await asyncio.sleep(0.002)
            ended = await asyncio.gather(*running)
        assert begun.count("doomed") == begun.count("good") == 6
        assert [got for engine, got in ended if engine == "good"] == [60] * 46
        assert all(got < 60 for engine, got in ended if engine == "doomed")
        assert f.router.picker.models() == {MODEL: 1}
        assert f.metric("npufleet_router_ejections_total", model=MODEL) == 1
        async with engine_process(port, "doomed"):
            await until(lambda: f.router.picker.models() == {MODEL: 2}, 30)
            assert {(await stream(f.stub, []))[0] for _ in range(4)} == {"good", "doomed"}
    await good.stop()


async def test_a_dead_engine_is_seen_without_any_request():
    port = free_port()
    # Health checks once an hour: only the connection itself can tell.
    settings = RouterSettings(probe_interval=3600, load_interval=3600, recovery_interval=0.05)
    async with (
        fleet(source=ListSource(at(port, "a")), settings=settings, wait=False) as f,
        engine_process(port, "a") as process,
    ):
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        process.kill()
        await until(lambda: f.router.picker.models() == {MODEL: 0})


async def test_a_frozen_engine_is_ejected_and_comes_back_when_it_thaws():
    port = free_port()
    settings = RouterSettings(
        keepalive_time=3600, probe_interval=0.1, probe_timeout=0.2, probe_misses=2, recovery_interval=0.1
    )
    async with (
        engine_process(port, "a") as process,
        fleet(source=ListSource(at(port, "a")), settings=settings, wait=False) as f,
    ):
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: f.router.picker.models() == {MODEL: 1})


async def test_keepalive_breaks_the_streams_of_a_frozen_engine():
    port = free_port()
    settings = RouterSettings(
        keepalive_time=1, keepalive_timeout=0.5, probe_interval=3600, load_interval=3600
    )
    async with (
        engine_process(port, "a") as process,
        fleet(source=ListSource(at(port, "a")), settings=settings, wait=False) as f,
    ):
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        call = f.stub.Generate(generate_request(100_000))
        await call.read()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(60):
                while True:
                    await call.read()
        assert caught.value.code() is Code.UNAVAILABLE


async def test_an_engine_that_says_it_does_not_serve_gets_nothing():
    engines = [FakeEngine(name=n) for n in "ab"]
    async with fleet(*engines) as f:
        engines[0].healthy = False
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        for _ in range(4):
            await tokens_of(f.stub.Generate(generate_request()))
        assert f.served() == [0, 4]
        engines[0].healthy = True
        await until(lambda: f.router.picker.models() == {MODEL: 2})


async def test_a_draining_engine_finishes_its_streams_and_takes_no_new_ones():
    engines = [FakeEngine(name=n, delay=0.01) for n in "ab"]
    async with fleet(*engines) as f:
        running = [asyncio.create_task(tokens_of(f.stub.Generate(generate_request(30)))) for _ in range(2)]
        await until(lambda: f.served() == [1, 1])
        f.source.put(endpoint(engines[0], state=EngineState.DRAINING), endpoint(engines[1]))
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        for _ in range(3):
            await tokens_of(f.stub.Generate(generate_request(1)))
        assert f.served() == [1, 4]
        assert [len(tokens) for tokens in await asyncio.gather(*running)] == [30, 30]


async def test_an_engine_that_left_finishes_its_streams_then_its_link_closes():
    engines = [FakeEngine(name=n, delay=0.01) for n in "ab"]
    async with fleet(*engines) as f:
        pool = f.router.picker.pool
        running = [asyncio.create_task(tokens_of(f.stub.Generate(generate_request(30)))) for _ in range(2)]
        await until(lambda: f.served() == [1, 1])
        f.source.put(endpoint(engines[1]))
        await until(lambda: pool.member("a") is None)
        assert [member.engine_id for member in pool.leaving()] == ["a"]
        assert f.metric("npufleet_router_picks_total", model=MODEL, engine="a") == 1
        assert [len(tokens) for tokens in await asyncio.gather(*running)] == [30, 30]
        await until(lambda: not pool.leaving())
        assert f.metric("npufleet_router_picks_total", model=MODEL, engine="a") == 0
        assert f.metric("npufleet_router_picks_total", model=MODEL, engine="b") == 1


async def test_a_request_waits_for_no_starting_engine_but_names_it():
    engine = await FakeEngine(name="a").start()
    source = ListSource(endpoint(engine, state=EngineState.STARTING))
    async with fleet(engine, source=source, wait=False) as f:
        await until(lambda: f.router.picker.pool.member("a"))
        await asyncio.sleep(0.2)
        with pytest.raises(NoEngine, match="1 starting"):
            await f.router.picker.pick(RequestInfo(model=MODEL))
        source.put(endpoint(engine))
        await until(lambda: f.router.picker.models() == {MODEL: 1})
    await engine.stop()


async def test_a_model_whose_engines_are_all_gone_is_unavailable_until_it_is_forgotten():
    engine = FakeEngine(name="a")
    for memory, reason in [(300.0, "not_ready"), (0.01, "not_ready")]:
        async with fleet(engine, settings=RouterSettings(model_memory=memory)) as f:
            f.source.put()
            await until(lambda f=f: not f.router.picker.pool.members())
            await asyncio.sleep(0.05)
            with pytest.raises(NoEngine) as caught:
                await f.router.picker.pick(RequestInfo(model=MODEL))
            assert caught.value.reason == reason
            assert f.router.picker.models() == ({MODEL: 0} if memory > 1 else {})


async def test_a_member_that_was_just_woken_closes_too():
    async with fleet(FakeEngine(name="a"), settings=replace(QUICK, probe_interval=60)) as f:
        (member,) = f.router.picker.pool.members()
        await asyncio.sleep(0.2)  # it waits for its next health check, or for this
        member._wake.set()
        await asyncio.wait_for(member.close(), 5)


async def test_old_versions_are_ignored_and_a_new_epoch_is_not():
    engines = [FakeEngine(name=n) for n in "ab"]
    async with fleet(*engines) as f:
        pool = f.router.picker.pool
        f.source._version = 0
        f.source.put(endpoint(engines[0]))  # version 1 again
        await asyncio.sleep(0.1)
        assert len(pool.members()) == 2
        f.source.put(endpoint(engines[0]), epoch="two")
        await until(lambda: len(pool.members()) == 1)


async def test_a_source_that_fails_keeps_the_known_engines():
    engine = FakeEngine(name="a")

    class Failing(ListSource):
        asked = 0

        async def watch(self):
            self.asked += 1
            yield self.snapshot
            raise RuntimeError("the controller is gone")

    await engine.start()
    source = Failing(endpoint(engine))
    async with fleet(engine, source=source) as f:
        await until(lambda: source.asked >= 2)
        assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]
    await engine.stop()


async def test_an_engine_whose_every_call_fails_is_asked_less_and_less():
    """Its health check says yes, each request says no: it must not eat a retry of every request."""
    bad, good = FakeEngine(name="a", fail_at=0), FakeEngine(name="b")
    async with fleet(bad, good, settings=QUICK) as f:
        for _ in range(300):
            assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]
        assert len(good.seen) == 300
        assert len(bad.seen) < 30


async def test_a_stream_that_outstays_a_removed_engine_is_ended_with_a_reason():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine, settings=RouterSettings(leave_timeout=0.3)) as f:
        call = f.stub.Generate(generate_request(100_000))
        await call.read()
        f.source.put()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()
        assert caught.value.code() is Code.UNAVAILABLE and "closed its link" in caught.value.details()
        await until(lambda: engine.cancelled == ["r"])


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_an_engine_whose_link_was_dropped_comes_back_each_time(transport: str):
    engine = FakeEngine(name="a")
    async with fleet(engine, settings=replace(QUICK, transport=transport, load_interval=0.02)) as f:
        (member,) = f.router.picker.pool.members()
        for _ in range(3):
            member._lost("it is stuck")
            member.channel.drop("it is stuck")
            await until(lambda: member.pickable)
            assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]
        assert not any(task.done() for task in member._tasks), "its loops go on"
