"""Engines that answer health checks and nothing else, or nothing but errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from npufleet.cluster.router.progress import Breaker, Progress

from .router_fakes import MODEL, QUICK, FakeEngine, fleet, generate_request, tokens_of, until

Code = grpc.StatusCode
WATCHFUL = replace(QUICK, stall_timeout=0.4, first_stall_timeout=1.2)


def test_silence_counts_only_while_there_is_work():
    now = [0.0]
    progress = Progress(10, 60, clock=lambda: now[0])
    now[0] = 1000.0
    assert progress.silent_for(0, 0) == 0
    now[0] = 1009.0
    assert progress.silent_for(3, 1) == 0
    now[0] = 1011.0
    assert progress.silent_for(3, 1) == 11
    assert progress.silent_for(3, 3) == 0  # all of them wait for a first message
    progress.heard()
    assert progress.silent_for(3, 1) == 0
    now[0] = 1072.0
    assert progress.silent_for(3, 3) == 61


def test_a_breaker_opens_after_failures_in_a_row_and_then_at_the_first():
    breaker = Breaker(3)
    assert [breaker.failed() for _ in range(2)] == [False, False]
    breaker.succeeded()
    assert [breaker.failed() for _ in range(5)] == [False, False, True, True, True]
    breaker.succeeded()
    assert not breaker.failed()


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_a_stuck_engine_is_ejected_and_its_unanswered_requests_go_elsewhere(transport: str):
    stuck, good = FakeEngine(name="a", delay=0.01), FakeEngine(name="b", delay=0.01)
    settings = replace(WATCHFUL, transport=transport)
    async with fleet(stuck, good, settings=settings) as f:
        begun = f.stub.Generate(generate_request(10_000, request_id="begun"))
        await begun.read()  # round robin: on the first engine
        assert stuck.seen and not good.seen
        stuck.delay = 60
        unanswered = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(3, request_id="other"))))
        await until(lambda: good.seen or len(stuck.seen) == 2)
        third = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(3, request_id="third"))))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await begun.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is Code.UNAVAILABLE
        assert await unanswered == [6, 7, 8]
        if transport == "http2":  # grpcio cancels instead, which cannot be told from our own cancel
            assert await third == [6, 7, 8]
        await until(lambda: set(stuck.cancelled) >= {"begun"})
        assert f.metric("npufleet_router_ejections_total", model=MODEL) >= 1
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


async def test_an_engine_that_only_fails_rests_and_is_tried_again_within_seconds():
    bad, good = FakeEngine(name="a", fail_at=0, fail_code=Code.INTERNAL), FakeEngine(name="b")
    async with fleet(bad, good) as f:
        for _ in range(40):
            assert len(await tokens_of(f.stub.Generate(generate_request(3)))) == 3
        assert 5 <= len(bad.seen) < 15, "after five failures in a row it rests"
        bad.fail_at = None
        served = len(good.seen)
        async with asyncio.timeout(5):
            while not any(request.request_id == "after" for request in bad.seen):
                await tokens_of(f.stub.Generate(generate_request(1, request_id="after")))
                await asyncio.sleep(0.01)
        assert len(good.seen) > served


async def test_the_only_engine_is_never_put_to_rest():
    bad = FakeEngine(name="a", fail_at=0, fail_code=Code.INTERNAL)
    async with fleet(bad) as f:
        for _ in range(12):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(f.stub.Generate(generate_request(3)))
            assert caught.value.code() is Code.INTERNAL
        assert len(bad.seen) == 12


@pytest.mark.parametrize(
    "code", [Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED, Code.CANCELLED]
)
async def test_what_clients_cause_puts_no_engine_to_rest(code: grpc.StatusCode):
    engines = [FakeEngine(name=name, fail_at=0, fail_code=code) for name in "ab"]
    async with fleet(*engines) as f:
        for _ in range(20):
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await tokens_of(f.stub.Generate(generate_request(3)))
        assert f.router.picker.models() == {MODEL: 2}
