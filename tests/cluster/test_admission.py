"""Keys, rates, fair queues and the gate: who gets in, in which order, and when to come back."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.admission.bucket import TokenBucket
from npufleet.cluster.admission.fair import FairQueue
from npufleet.cluster.admission.gate import Gate
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import ANYONE, Keys, Tenant, read_key_file
from npufleet.cluster.router.base import ASSUMED, EngineLoad, Pace, RequestInfo
from npufleet.cluster.router.errors import NoEngine, NoEngineReason


def test_keys_name_their_tenants():
    keys = Keys(
        [
            "plain",
            "# note",
            "one tenant=a weight=3 tokens_per_minute=600",
            "two tenant=a",
            "op tenant=o admin=yes",
        ]
    )
    assert keys.tenant(b"plain") == Tenant()
    assert keys.tenant(b"one") == keys.tenant(b"two") == Tenant(name="a", weight=3.0, tokens_per_minute=600)
    assert keys.tenant(b"op") == Tenant(name="o", admin=True)
    assert keys.tenant(b"") is None and keys.tenant(b"three") is None and keys.tenant(b"x" * 5000) is None
    assert keys.tenant_of([("authorization", "Bearer one")]) is keys.tenant(b"one")
    assert keys.tenant_of([("authorization", b"bearer  two")]) is keys.tenant(b"one")
    assert keys.tenant_of([("x-api-key", "plain")]) == Tenant()
    for wrong in ([], [("authorization", "Basic one")], [("authorization", "one")], [("x-key", "one")]):
        assert keys.tenant_of(wrong) is None
    assert Keys(()).tenant_of([]) is ANYONE and not Keys(())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a weight=2"], "line 1 .*add tenant=NAME"),
        (["a tenat=x"], "line 1 .*'tenat' is none of .*did you mean tenant="),
        (["a tenant=x weight=0"], "weight must be a number above 0, got '0'"),
        (["a tenant=x weight=nan"], "weight must be a number above 0, got 'nan'"),
        (["a tenant=x weight=inf"], "weight must be a number above 0, got 'inf'"),
        (["a tenant=x weight=1 weight=2"], "weight is given twice"),
        (["a tenant=x tenant=y"], "tenant is given twice"),
        (["a tenant=x tokens_per_minute=many"], "tokens_per_minute must be a number above 0"),
        (["a tenant=x admin=maybe"], "admin must be yes or no"),
        (["a", "b", "a"], "line 3 .*given twice"),
        (["a tenant=x weight=1", "b tenant=x weight=2"], "line 2 .*'x' has another weight"),
    ],
)
def test_a_key_line_that_is_wrong_is_named(lines: list[str], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        Keys(lines)
    assert "'a'" not in str(caught.value).split("line")[0], "an error must not show a key"


def test_a_key_file_is_checked_when_it_is_read(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("a wieght=2\n")
    with pytest.raises(ValueError, match="did you mean weight="):
        read_key_file(file)
    file.write_text("# a comment\n\nBearer sk-secret\n")
    with pytest.raises(ValueError, match=r"^line 3 of the API keys: after the key come") as caught:
        read_key_file(file)
    assert "sk-secret" not in str(caught.value)


def test_a_bucket_lets_a_minutes_worth_through_and_then_the_rate():
    now = [0.0]
    bucket = TokenBucket(600, clock=lambda: now[0])
    assert bucket.take(400) == 0 and bucket.take(200) == 0
    assert bucket.take(50) == pytest.approx(5.0)
    now[0] = 5.0
    assert bucket.take(50) == 0
    bucket.charge(100)  # an answer takes it below zero, and the next one waits for both
    assert bucket.take(10) == pytest.approx(11.0)
    now[0] = 1e6
    assert bucket.left == 600
    assert bucket.take(10_000) == 0  # a prompt above the whole bucket gets in when it is full ...
    assert bucket.take(1) == pytest.approx((10_000 - 600 + 1) / 10)  # ... and is paid for afterwards


def test_a_fair_queue_shares_by_weight_and_serves_priorities_first():
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(300):
        queue.push(("heavy", number), tenant="heavy", weight=3, priority=0, cost=10)
        queue.push(("light", number), tenant="light", weight=1, priority=0, cost=10)
    queue.push(("urgent", 0), tenant="light", weight=1, priority=-1, cost=10)
    assert queue.pop() == ("urgent", 0)
    first = Counter(name for name, _ in (queue.pop() for _ in range(200)))
    assert 140 <= first["heavy"] <= 160
    rest = [queue.pop() for _ in range(len(queue))]
    for name in ("heavy", "light"):  # within a tenant in order
        numbers = [number for who, number in rest if who == name]
        assert numbers == sorted(numbers)
    assert queue.pop() is None and len(queue) == 0


def test_a_tenant_that_was_away_owes_nothing_and_is_owed_nothing():
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"a{number}", tenant="a", weight=1, priority=0, cost=1)
    for _ in range(50):
        queue.pop()
    for number in range(10):
        queue.push(f"b{number}", tenant="b", weight=1, priority=0, cost=1)
    order = [queue.pop() for _ in range(20)]
    assert sum(1 for entry in order if entry and entry[0] == "b") == 10  # by turns, not first


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_whatever_leaves_a_fair_queue_entered_it_once(entries: list[tuple[str, int, bool]]):
    queue: FairQueue[object] = FairQueue()
    pushed = []
    for tenant, cost, stays in entries:
        entry = object()
        queue.push(entry, tenant=tenant, weight=1 + cost % 3, priority=cost % 2, cost=cost)
        if stays:
            pushed.append(entry)
        else:
            assert queue.remove(entry) and not queue.remove(entry)
    assert len(queue) == len(pushed)
    popped = list(iter(queue.pop, None))
    assert set(map(id, popped)) == set(map(id, pushed)) and len(popped) == len(pushed)


class Engines:
    """Engines whose room and loads the test sets."""

    def __init__(self, room: int = 10**6, loads: Sequence[EngineLoad] = ()) -> None:
        self.free, self.loads = room, loads

    def room(self, model: str, slots: int) -> int:
        return self.free

    def look(self, model: str, info: RequestInfo) -> Sequence[EngineLoad]:
        return self.loads


def info(tokens: int = 100, tenant: Tenant = ANYONE, priority: int = 0) -> RequestInfo:
    return RequestInfo(model="m", prompt_tokens=tokens, tenant=tenant, priority=priority)


async def refusal(gate: Gate, request: RequestInfo) -> NoEngine:
    with pytest.raises(NoEngine) as caught:
        await gate.enter("m", request)
    return caught.value


async def test_a_tenants_tokens_are_counted_with_its_answers():
    gate = Gate(AdmissionSettings(), Engines())
    tenant = Tenant(name="a", tokens_per_minute=600)
    await gate.enter("m", info(300, tenant))
    gate.charge(tenant, 300)
    error = await refusal(gate, info(100, tenant))
    assert error.reason is NoEngineReason.RATE_LIMITED and "tenant 'a'" in str(error)
    assert error.retry_after is not None and 9.9 <= error.retry_after <= 13
    await gate.enter("m", info(100, Tenant(name="b", tokens_per_minute=600)))
    await gate.enter("m", info(100))


def load(queued_tokens: int, pace: Pace) -> EngineLoad:
    return EngineLoad("e", queued_tokens=queued_tokens, pace=pace)


async def test_what_would_come_too_late_is_refused_with_the_time_that_its_wait_takes():
    refused: list[NoEngineReason] = []
    pace = Pace(base=0.0, token=0.001, token_decode=0.0, pair=0.0, known=True)
    engines = Engines(loads=[load(9_000, pace), load(7_900, pace)])
    gate = Gate(AdmissionSettings(ttft_objective=2.0), engines, lambda model, reason: refused.append(reason))
    error = await refusal(gate, info(100))
    assert error.reason is NoEngineReason.OVERLOADED and "in 8.0 s" in str(error)
    assert error.retry_after is not None and 6.0 <= error.retry_after <= 7.5  # 8 s predicted, 2 s allowed
    engines.loads = [load(9_000, pace), load(0, pace)]
    await gate.enter("m", info(100))
    await gate.enter("m", info(100_000))  # its own prompt takes longer than that whenever it comes
    engines.loads = [load(10**9, ASSUMED)]
    await gate.enter("m", info(100))  # nothing is known of the pace: nobody is refused for a guess
    assert refused == [NoEngineReason.OVERLOADED]


async def test_requests_wait_for_room_in_their_tenants_turns():
    engines = Engines(room=0)
    gate = Gate(AdmissionSettings(), engines)
    order: list[str] = []

    async def one(name: str, tenant: Tenant, priority: int = 0) -> None:
        await gate.enter("m", info(10, tenant, priority))
        engines.free -= 1  # it is on an engine now
        order.append(name)

    many, few = Tenant(name="many"), Tenant(name="few")
    tasks = [asyncio.create_task(one(f"many{i}", many)) for i in range(4)]
    tasks += [asyncio.create_task(one(f"few{i}", few)) for i in range(2)]
    tasks.append(asyncio.create_task(one("urgent", many, -5)))
    await asyncio.sleep(0)
    assert gate.waiting("m") == 7 and not order
    for _ in range(7):
        engines.free += 1
        gate.freed("m")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order[0] == "urgent"
    assert [name for name in order if name[:3] == "few"] == ["few0", "few1"]
    assert order.index("few1") <= 4, f"few shares with many: {order}"
    assert gate.waiting("m") == 0


async def test_one_place_lets_one_in_and_a_newcomer_does_not_overtake():
    engines = Engines(room=0)
    gate = Gate(AdmissionSettings(), engines)
    inside = itertools.count()

    async def one() -> None:
        await gate.enter("m", info())
        engines.free -= 1
        next(inside)

    waiting = [asyncio.create_task(one()) for _ in range(3)]
    await asyncio.sleep(0)
    engines.free = 1
    gate.freed("m")
    gate.freed("m")
    newcomer = asyncio.create_task(one())
    for _ in range(5):
        await asyncio.sleep(0)
    assert next(inside) == 1 and waiting[0].done() and not newcomer.done()
    for task in (*waiting, newcomer):
        task.cancel()
    await asyncio.gather(*waiting, newcomer, return_exceptions=True)
    assert gate.waiting("m") == 0


async def test_who_leaves_when_let_in_gives_the_place_to_the_next():
    engines = Engines(room=0)
    gate = Gate(AdmissionSettings(), engines)
    first, second = (asyncio.create_task(gate.enter("m", info())) for _ in range(2))
    await asyncio.sleep(0)
    engines.free = 1
    gate.freed("m")
    first.cancel()  # it was let in, but has not run yet
    await asyncio.wait_for(second, 5)


async def test_the_queue_is_bounded_and_so_is_the_wait():
    gate = Gate(AdmissionSettings(max_queue=2, queue_timeout=0.05), Engines(room=0))
    waiting = [asyncio.create_task(gate.enter("m", info())) for _ in range(2)]
    await asyncio.sleep(0)
    error = await refusal(gate, info())
    assert error.reason is NoEngineReason.OVERLOADED and "2 requests" in str(error) and error.retry_after
    for task in waiting:
        with pytest.raises(NoEngine, match="had room within"):
            await task
    assert gate.waiting("m") == 0


async def test_without_engines_nobody_waits():
    await Gate(AdmissionSettings(), Engines(room=-1)).enter("m", info())


@pytest.mark.parametrize("name", ["engine_slots", "max_queue", "queue_timeout", "ttft_objective"])
@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "5", None, True])
def test_settings_are_checked(name: str, wrong: Any):
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        AdmissionSettings(**{name: wrong})
