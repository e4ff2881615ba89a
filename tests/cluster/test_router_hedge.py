"""A second engine for short requests that take long, over fakes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import pytest

from npufleet.cluster.router.hedge import Hedges, HedgeSettings, race
from npufleet.cluster.router.picker import Picker

from .router_fakes import MODEL, QUICK, FakeEngine, Fleet, fleet, generate_request, tokens_of, until

HEDGING = HedgeSettings(max_tokens=8)
SETTINGS = replace(QUICK, hedging=HEDGING)
FOREVER = 60.0  # longer than any test


def short(**changes):
    request = generate_request(4)
    request.stream = False
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def taught(f: Fleet, seconds: float = 0.01) -> Picker:
    """A picker that knows how long short requests take."""
    picker = f.router.picker
    for _ in range(40):
        picker.hedges.learn(MODEL, seconds)
    return picker


def hedges(f: Fleet) -> dict[str, float]:
    told = {kind: f.metric("npufleet_router_hedges_total", model=MODEL, outcome=kind) for kind in KINDS}
    return {kind: count for kind, count in told.items() if count}


KINDS = ("won", "lost", "over_budget")


class Answer:
    """What an attempt of a test brings."""

    def __init__(self, name: str) -> None:
        self.name, self.dropped = name, False

    def drop(self) -> None:
        self.dropped = True


async def attempt(
    answer: Answer, gate: asyncio.Event, log: list[str], error: Exception | None = None
) -> Answer:
    try:
        await gate.wait()
    except asyncio.CancelledError:
        log.append(f"{answer.name} cancelled")
        raise
    if error is not None:
        raise error
    return answer


async def test_the_engine_that_answers_first_wins_and_the_other_one_is_let_go() -> None:
    slow, quick = FakeEngine(name="a", delay=FOREVER), FakeEngine(name="b")
    async with fleet(slow, quick, settings=SETTINGS) as f:
        taught(f)
        answered = [await tokens_of(f.stub.Generate(short())) for _ in range(3)]
        assert answered == [[6, 7, 8, 9]] * 3
        assert {"won": len(slow.seen)} == hedges(f) and slow.seen
        await until(lambda: not slow.running)
        assert len(slow.cancelled) == len(slow.seen)
        await until(lambda: all(member.in_flight == 0 for member in f.router.picker.pool.members()))
        assert all(member.pickable for member in f.router.picker.pool.members()), "slow is not broken"


async def test_a_client_that_goes_ends_both() -> None:
    engines = [FakeEngine(name=name, delay=FOREVER) for name in "ab"]
    async with fleet(*engines, settings=SETTINGS) as f:
        taught(f)
        call = f.stub.Generate(short())
        await until(lambda: all(engine.running for engine in engines))
        call.cancel()
        await until(lambda: not any(engine.running for engine in engines))
        await until(lambda: all(member.in_flight == 0 for member in f.router.picker.pool.members()))


@pytest.mark.parametrize(
    "request_", [generate_request(4), short(stream=True), generate_request(9)], ids=["stream", "set", "long"]
)
async def test_what_is_no_short_call_has_one_engine(request_) -> None:
    engines = [FakeEngine(name=name) for name in "ab"]
    async with fleet(*engines, settings=SETTINGS) as f:
        taught(f, 1e-6)
        await tokens_of(f.stub.Generate(request_))
        assert sum(f.served()) == 1 and not hedges(f)


async def test_it_is_off_by_default() -> None:
    engines = [FakeEngine(name=name, delay=0.01) for name in "ab"]
    async with fleet(*engines) as f:
        taught(f, 1e-6)
        await tokens_of(f.stub.Generate(short()))
        assert sum(f.served()) == 1


async def test_a_single_engine_has_no_second() -> None:
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine, settings=SETTINGS) as f:
        taught(f, 1e-6)
        assert await tokens_of(f.stub.Generate(short())) == [6, 7, 8, 9]
        assert len(engine.seen) == 1 and not hedges(f)


async def test_when_the_first_engine_fails_the_second_ones_answer_stands() -> None:
    bad, good = FakeEngine(name="a", delay=0.3, fail_at=0), FakeEngine(name="b", delay=0.3)
    async with fleet(bad, good, settings=SETTINGS) as f:
        taught(f, 1e-6)
        for _ in range(2):
            assert await tokens_of(f.stub.Generate(short())) == [6, 7, 8, 9]


async def test_the_status_of_the_first_engine_stands_where_both_fail() -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    engines = [FakeEngine(name=name, delay=0.2, fail_at=0, fail_code=code) for name in "ab"]
    async with fleet(*engines, settings=SETTINGS) as f:
        taught(f, 1e-6)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(f.stub.Generate(short()))
        assert caught.value.code() is code
        assert sum(f.served()) == 2


def test_the_percentile_is_of_the_last_answers_and_needs_some() -> None:
    book = Hedges(HEDGING, lambda model, outcome: None)
    for number in range(31):
        book.learn("m", float(number))
        assert book.delay("m") is None
    for number in range(31, 100):
        book.learn("m", float(number))
    assert book.delay("m") == 95.0
    assert book.delay("other") is None
    for _ in range(256):
        book.learn("m", 1.0)
    assert book.delay("m") == 1.0, "what is long ago is forgotten"


def test_the_budget_is_a_share_of_the_requests() -> None:
    told: Counter[str] = Counter()
    book = Hedges(HEDGING, lambda model, outcome: told.update([outcome]))
    taken = 0
    for _ in range(1000):
        book.delay("m")
        taken += book.take("m")
    assert 50 <= taken <= 58, "one in twenty, and the reserve of the beginning"
    assert told == {"over_budget": 1000 - taken}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1}, {"max_tokens": math.nan}, {"max_tokens": "8"}, {"max_tokens": True},
        {"max_prompt_tokens": 0}, {"max_prompt_tokens": math.inf}, {"percentile": 1.0}, {"percentile": 95},
        {"percentile": math.nan}, {"budget": 0.0}, {"budget": math.nan},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        HedgeSettings(**wrong)


async def test_an_answer_that_comes_in_the_same_moment_is_given_back() -> None:
    gate, log = asyncio.Event(), []
    one, two = Answer("one"), Answer("two")

    async def second():
        gate.set()
        return attempt(two, gate, log)

    won, by_second = await race(attempt(one, gate, log), 0.01, second)
    assert (won, by_second) == (one, False)
    assert not one.dropped
    assert two.dropped or log == ["two cancelled"]


async def test_a_first_attempt_that_fails_in_time_asks_nobody() -> None:
    gate = asyncio.Event()
    gate.set()

    async def second():
        raise AssertionError("nobody is asked")

    with pytest.raises(KeyError):
        await race(attempt(Answer("one"), gate, [], KeyError()), 5.0, second)


async def test_a_client_that_leaves_while_the_slower_engine_ends_leaves_nothing() -> None:
    quicker = Answer("quicker")

    async def slower() -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            asking.cancel()  # the client leaves now
            raise
        raise AssertionError("nobody lets it end")

    async def answers() -> Answer:
        return quicker

    async def second():
        return answers()

    asking = asyncio.create_task(race(slower(), 0.01, second))
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert quicker.dropped
