"""Policies and the counts they decide on, over made-up and random loads."""

from __future__ import annotations

import math
from collections import Counter

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.router.base import EngineLoad, LoadReport, RequestInfo, decide
from npufleet.cluster.router.errors import BROKE, FULL, LOST, attempts_for
from npufleet.cluster.router.ledger import Ledger
from npufleet.cluster.router.picker import NoEngine, Picker
from npufleet.cluster.router.policies.least_load import LeastLoad
from npufleet.cluster.router.policies.round_robin import RoundRobin
from npufleet.cluster.router.registry import DEFAULT_POLICY, known_policies, load_policy
from npufleet.cluster.router.retry import RetryBudget
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.split.base import Stage

REQUEST = RequestInfo(model="m")
counts = st.integers(0, 10**7)
reports = st.builds(
    LoadReport,
    running=counts,
    waiting=counts,
    waiting_tokens=counts,
    kv_usage=st.floats(-0.5, 1.5, allow_nan=False),
)
loads = st.builds(
    EngineLoad,
    engine_id=st.uuids().map(str),
    in_flight=counts,
    queued_tokens=counts,
    report=st.none() | reports,
    requests_since=st.integers(-1000, 1000),
    tokens_since=st.integers(-(10**6), 10**6),
)
fleets = st.lists(loads, min_size=1, max_size=12, unique_by=lambda load: load.engine_id)


def load(engine_id: str, in_flight: int = 0, queued: int = 0, **report: float) -> EngineLoad:
    said = LoadReport(**report) if report else None
    return EngineLoad(engine_id=engine_id, in_flight=in_flight, queued_tokens=queued, report=said)


def test_policies_are_known_by_name():
    assert len(known_policies()) == 9 and DEFAULT_POLICY in known_policies()
    for name in known_policies():
        assert load_policy(name).name == name == load_policy(name.replace("-", "_")).name


@pytest.mark.parametrize("name", ["leastload", "", "prefix"])
def test_an_unknown_policy_names_the_known_ones(name: str):
    with pytest.raises(ValueError, match=r"known: .*least-load, .*round-robin"):
        load_policy(name)


@given(fleets, st.integers(0, 1000))
def test_round_robin_gives_each_engine_the_same(engines: list[EngineLoad], start: int):
    turns = range(start, start + 3 * len(engines))
    picked = Counter(decide(RoundRobin(), REQUEST, engines, ticket).engine_id for ticket in turns)
    assert set(picked.values()) == {3} and len(picked) == len(engines)


@given(fleets, st.integers(0, 1000))
def test_least_load_takes_a_minimum_and_scores_are_finite(engines: list[EngineLoad], ticket: int):
    policy = LeastLoad()
    scores = {engine.engine_id: policy.score(REQUEST, engine) for engine in engines}
    assert all(math.isfinite(score) and score >= 0 for score in scores.values())
    assert scores[decide(policy, REQUEST, engines, ticket).engine_id] == min(scores.values())


@given(loads, st.integers(1, 1000))
def test_least_load_never_prefers_more_work(engine: EngineLoad, more: int):
    policy = LeastLoad()
    base = policy.score(REQUEST, engine)
    busier = EngineLoad(
        engine_id="x",
        in_flight=engine.in_flight + more,
        queued_tokens=engine.queued_tokens + more,
        report=engine.report,
        requests_since=engine.requests_since + more,
        tokens_since=engine.tokens_since + more,
    )
    assert policy.score(REQUEST, busier) >= base


def test_least_load_shares_evenly_between_equals():
    engines = [load(name) for name in "abc"]
    picked = Counter(decide(LeastLoad(), REQUEST, engines, t).engine_id for t in range(30))
    assert set(picked.values()) == {10}


@pytest.mark.parametrize(
    ("light", "heavy"),
    [
        (load("x", in_flight=1), load("y", in_flight=2)),
        (load("x", in_flight=3, queued=100), load("y", in_flight=1, queued=30_000)),
        (load("x", running=2, kv_usage=0.1), load("y", running=2, kv_usage=0.95)),
        (load("x", running=1), load("y", running=1, waiting=4)),
        (load("x", waiting_tokens=10), load("y", waiting_tokens=5000)),
        (load("x", running=0), load("y", in_flight=5, running=0)),
    ],
)
def test_least_load_sees_each_kind_of_work(light: EngineLoad, heavy: EngineLoad):
    for order in ([light, heavy], [heavy, light]):
        assert {decide(LeastLoad(), REQUEST, order, t).engine_id for t in range(2)} == {"x"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_report_is_corrected_by_what_was_sent_since_and_goes_stale():
    clock = Clock()
    ledger = Ledger("a", clock)
    ledger.sent(50)
    mark = ledger.mark()
    ledger.sent(700)
    ledger.take(LoadReport(running=1), mark)
    now = ledger.load(ttl=5)
    assert (now.in_flight, now.requests_since, now.tokens_since) == (2, 1, 700)
    ledger.started(50)
    ledger.ended(50, started=True)
    assert (ledger.load(5).requests_since, ledger.load(5).tokens_since) == (0, 650)
    clock.now += 6
    assert ledger.load(ttl=5).report is None and ledger.load(5).requests_since == 0
    assert ledger.report_age() == 6
    ledger.forget()
    assert ledger.report_age() is None


def test_an_answer_that_arrives_late_does_not_replace_a_newer_one():
    clock = Clock()
    ledger = Ledger("a", clock)
    early = ledger.mark()
    clock.now += 1
    ledger.take(LoadReport(running=2), ledger.mark())
    ledger.take(LoadReport(running=9), early)
    assert ledger.load(5).report == LoadReport(running=2)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 10_000))))
def test_the_ledger_balances(steps: list[tuple[int, int, int]]):
    """Whatever is sent, started and ended, in any order: the counts are exact and come back to zero."""
    ledger, live = Ledger("a", Clock()), []
    for action, which, tokens in steps:
        if action == 0 or not live:
            ledger.sent(tokens)
            live.append([tokens, False])
        elif action == 1 and not live[which % len(live)][1]:
            live[which % len(live)][1] = True
            ledger.started(live[which % len(live)][0])
        else:
            tokens, started = live.pop(which % len(live))
            ledger.ended(tokens, started=started)
        assert ledger.in_flight == len(live)
        assert ledger.queued_tokens == sum(tokens for tokens, started in live if not started)
    for tokens, started in live:
        ledger.ended(tokens, started=started)
    assert (ledger.in_flight, ledger.queued_tokens) == (0, 0)


class FakeMember:
    """A member that only counts."""

    def __init__(self, engine_id: str, ready: bool) -> None:
        self.engine_id, self.pickable = engine_id, ready
        self.ledgers = (Ledger(engine_id),)
        self.outcomes: list[grpc.StatusCode] = []
        self.endpoint = EngineEndpoint(
            engine_id=engine_id, model="m", address="", metrics_url="", state=EngineState.READY
        )

    def load(self) -> EngineLoad:
        return self.ledgers[0].load(5)

    def outcome(self, code: grpc.StatusCode) -> None:
        self.outcomes.append(code)


class FakePool:
    retry_after = 1.0
    settings = RouterSettings()

    def __init__(self, members: list[FakeMember]) -> None:
        self.all = members
        self.picked: list[str] = []

    def resolve(self, model: str) -> str:
        return model or "m"

    def pickable(self, model: str) -> list[FakeMember]:
        return [member for member in self.all if member.pickable]

    def fit(self, model: str, stage: Stage) -> list[FakeMember]:
        return self.pickable(model)

    def not_ready(self, model: str) -> NoEngine:
        return NoEngine("not_ready", "none", retry_after=1.0)

    def listen(self, listener) -> None:
        pass

    def on_pick(self, member: FakeMember) -> None:
        self.picked.append(member.engine_id)


@given(
    ready=st.lists(st.booleans(), max_size=6),
    excluded=st.sets(st.integers(0, 5)),
    policy=st.sampled_from(known_policies()),
    tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
)
async def test_a_pick_is_ready_and_not_excluded(ready, excluded, policy, tokens):
    members = [FakeMember(f"e{i}", state) for i, state in enumerate(ready)]
    pool = FakePool(members)
    picker = Picker(pool, load_policy(policy))  # type: ignore[arg-type]
    allowed = {f"e{i}" for i, state in enumerate(ready) if state and i not in excluded}
    barred = frozenset(f"e{i}" for i in excluded)
    for number in tokens:
        info = RequestInfo(model="m", prompt_tokens=number, excluded=barred)
        try:
            lease = await picker.pick(info)
        except NoEngine as error:
            assert not allowed
            assert error.reason == ("excluded" if any(ready) else "not_ready")
            assert error.retry_after == 1.0
        else:
            assert lease.endpoint.engine_id in allowed


async def test_a_lease_counts_once_however_often_it_is_released():
    member = FakeMember("a", True)
    picker = Picker(FakePool([member]), LeastLoad())  # type: ignore[arg-type]
    lease = await picker.pick(RequestInfo(model="m", prompt_tokens=7))
    assert (member.ledgers[0].in_flight, member.ledgers[0].queued_tokens) == (1, 7)
    lease.started()
    lease.started()
    assert (member.ledgers[0].in_flight, member.ledgers[0].queued_tokens) == (1, 0)
    lease.release()
    lease.release(grpc.StatusCode.UNAVAILABLE)
    lease.started()
    assert (member.ledgers[0].in_flight, member.ledgers[0].queued_tokens) == (0, 0)
    assert member.outcomes == [grpc.StatusCode.OK]


async def test_a_lease_as_a_context_releases_with_what_happened():
    member = FakeMember("a", True)
    picker = Picker(FakePool([member]), LeastLoad())  # type: ignore[arg-type]
    code = grpc.StatusCode.INTERNAL
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
    for error in (None, KeyError(), failure):
        try:
            with await picker.pick(RequestInfo(model="m")):
                if error:
                    raise error
        except (KeyError, grpc.aio.AioRpcError):
            pass
    assert member.ledgers[0].in_flight == 0
    assert member.outcomes == [grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, code]


async def test_a_burst_between_two_reports_is_spread_by_least_load():
    """Both engines report the same once; the router's own counts must spread what follows."""
    members = [FakeMember(name, True) for name in "ab"]
    for member in members:
        member.ledgers[0].take(LoadReport(running=3), member.ledgers[0].mark())
    picker = Picker(FakePool(members), LeastLoad())  # type: ignore[arg-type]
    for _ in range(20):
        await picker.pick(RequestInfo(model="m", prompt_tokens=100))
    assert [member.ledgers[0].in_flight for member in members] == [10, 10]


async def test_a_long_prompt_keeps_short_ones_away_until_it_has_started():
    members = [FakeMember(name, True) for name in "ab"]
    picker = Picker(FakePool(members), LeastLoad())  # type: ignore[arg-type]
    long = await picker.pick(RequestInfo(model="m", prompt_tokens=100_000))
    other = "b" if long.endpoint.engine_id == "a" else "a"
    short = [await picker.pick(RequestInfo(model="m", prompt_tokens=10)) for _ in range(5)]
    assert {lease.endpoint.engine_id for lease in short} == {other}
    long.started()
    assert (await picker.pick(RequestInfo(model="m"))).endpoint.engine_id == long.endpoint.engine_id


def test_every_code_has_one_verdict():
    for code in grpc.StatusCode:
        expected = 5 if code in LOST | FULL else 2 if code in BROKE | {grpc.StatusCode.ABORTED} else 1
        assert attempts_for(code, 5) == expected
        assert attempts_for(code, 1) == 1


def test_the_retry_budget_refills_by_success_up_to_its_size():
    budget = RetryBudget(3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.succeeded()
    assert [budget.take() for _ in range(2)] == [True, False]
    for _ in range(1000):
        budget.succeeded()
    assert budget.left == 3


@pytest.mark.parametrize("name", ["probe_interval", "max_attempts", "max_request_bytes"])
def test_a_setting_that_makes_no_sense_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        RouterSettings(**{name: 0})
