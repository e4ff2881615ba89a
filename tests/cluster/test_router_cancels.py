"""Cancels in every phase reach the engine, and any number of them leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace

import grpc
import pytest

from npufleet.cluster.admission.settings import AdmissionSettings

from .router_fakes import MODEL, QUICK, FakeEngine, Fleet, fleet, generate_request, until

FEW = replace(QUICK, admission=AdmissionSettings(engine_slots=24))


def nothing_is_left(f: Fleet) -> bool:
    """No engine, ledger, queue, table or connection holds a request."""
    members = f.router.picker.pool.members()
    return (
        all(member.ledgers[0].in_flight == member.ledgers[0].queued_tokens == 0 for member in members)
        and f.router.picker.gate.waiting(MODEL) == 0
        and len(f.router._front.live) == 0
        and f.metric("npufleet_router_in_flight", model=MODEL) == 0
        and all(len(engine.running) == 0 for engine in f.engines)
        and all(not any(c.path.endswith("Generate") for c in calls_of(member)) for member in members)
    )


def calls_of(member):
    connection = member.channel._connection
    return [] if connection is None else list(connection._streams.values())


@pytest.mark.parametrize("phase", ["waiting for an engine", "prefill", "between tokens", "in a burst"])
async def test_a_cancel_reaches_the_engine_in_each_phase(phase: str):
    engine = FakeEngine(name="a", delay=60 if phase != "in a burst" else 0.0)
    settings = replace(QUICK, admission=AdmissionSettings(engine_slots=1))
    async with fleet(engine, settings=settings if phase == "waiting for an engine" else QUICK) as f:
        holder = f.stub.Generate(generate_request(2, request_id="holder"))
        await until(lambda: len(engine.seen) == 1)
        if phase == "between tokens":
            engine.delay = 0.01
        call = f.stub.Generate(generate_request(10**6, request_id="mine"))
        reading = asyncio.create_task(call.read())
        if phase == "waiting for an engine":
            await until(lambda: f.router.picker.gate.waiting(MODEL) == 1)
        elif phase == "prefill":
            await until(lambda: len(engine.seen) == 2)
        else:
            await reading
            engine.delay = 60 if phase == "between tokens" else 0.0
        call.cancel()
        if phase == "waiting for an engine":
            await until(lambda: f.router.picker.gate.waiting(MODEL) == 0)
        else:
            await until(lambda: "mine" in engine.cancelled)
        holder.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: nothing_is_left(f))
        assert len(engine.seen) == (1 if phase == "waiting for an engine" else 2)


async def many_cancels(number: int, at_once: int) -> None:
    """Calls of random shape, each cancelled at a random moment, or let through."""
    rng = random.Random(7)
    engines = [FakeEngine(name=name, delay=0.002) for name in "ab"]
    async with fleet(*engines, settings=FEW, policy="least-load") as f:
        ended: dict[str, int] = {"whole": 0, "cancelled": 0}
        left = iter(range(number))

        async def one(i: int) -> None:
            tokens = rng.choice([1, 3, 20, 1000])
            call = f.stub.Generate(generate_request(tokens, (i % 50, 1), f"r{i}"))

            async def read() -> None:
                while await call.read() is not grpc.aio.EOF:
                    pass

            task = asyncio.create_task(read())
            await asyncio.wait([task], timeout=rng.choice([0.0, 0.001, 0.005, 0.02, 0.1, 2.0]))
            if task.done():
                ended["whole"] += 1
                return task.result()
            call.cancel()
            ended["cancelled"] += 1
            await asyncio.gather(task, return_exceptions=True)

        async def worker() -> None:
            for i in left:
                await one(i)

        await asyncio.gather(*(worker() for _ in range(at_once)))
        assert ended["cancelled"] > number / 4 and ended["whole"] > 0
        await until(lambda: nothing_is_left(f), 20)
        gc.collect()
        calls = [
            o for o in gc.get_objects() if type(o).__name__ == "Http2Call" and o.path.endswith("Generate")
        ]
        assert len(calls) <= 2, "calls that ended are kept alive"
        assert len([t for t in asyncio.all_tasks() if "Generate" in repr(t.get_coro())]) == 0


async def test_hundreds_of_random_cancels_leave_nothing_behind():
    await many_cancels(400, 60)


@pytest.mark.slow
async def test_ten_thousand_random_cancels_leave_nothing_behind():
    await many_cancels(10_000, 80)
