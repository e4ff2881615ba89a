"""Policies beyond least load, and the decider that feeds them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.router.base import ASSUMED, EngineLoad, LoadReport, Pace, RequestInfo, decide
from npufleet.cluster.router.decider import Decider
from npufleet.cluster.router.ledger import Ledger
from npufleet.cluster.router.pace import PaceBook, Sight
from npufleet.cluster.router.policies.consistent_hash import ConsistentHash
from npufleet.cluster.router.policies.power_of_two import PowerOfTwo
from npufleet.cluster.router.policies.predicted_ttft import PredictedTtft, predict
from npufleet.cluster.router.policies.random_pick import RandomPick
from npufleet.cluster.router.prefix.prompt import TokenPrompt, pack
from npufleet.cluster.router.registry import known_policies, load_policy
from npufleet.cluster.router.sessions import Sessions

REQUEST = RequestInfo(model="m", prompt_tokens=1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def engines(*in_flight: int) -> list[EngineLoad]:
    return [EngineLoad(f"e{i}", in_flight=number) for i, number in enumerate(in_flight)]


@pytest.mark.parametrize("policy", [RandomPick(seed=1), PowerOfTwo(seed=1)])
def test_chance_follows_from_the_ticket_and_reaches_every_engine(policy):
    fleet = engines(1, 1, 1, 1)
    first = [decide(policy, REQUEST, fleet, ticket).engine_id for ticket in range(400)]
    assert first == [decide(policy, REQUEST, fleet, ticket).engine_id for ticket in range(400)]
    counts = Counter(first)
    assert len(counts) == 4 and max(counts.values()) < 150


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(0, 10**6))
def test_power_of_two_never_takes_the_single_worst(loads: list[int], ticket: int):
    fleet = engines(*loads)
    picked = decide(PowerOfTwo(seed=3), REQUEST, fleet, ticket)
    if sorted(loads)[-1] > sorted(loads)[-2]:
        assert picked.in_flight < max(loads)


def test_a_session_stays_and_new_engines_do_not_move_it():
    decider = Decider(load_policy("sticky-session"))
    ledgers = [Ledger(name) for name in "abc"]
    info = RequestInfo(model="m", session="s", prompt_tokens=10)
    first = decider.choose("m", info, ledgers, 5.0).engine_id
    for _ in range(5):
        assert decider.choose("m", info, [Ledger("new"), *ledgers], 5.0).engine_id == first
    others = [ledger for ledger in ledgers if ledger.engine_id != first]
    moved = decider.choose("m", info, others, 5.0).engine_id
    assert moved != first and decider.choose("m", info, ledgers, 5.0).engine_id == moved


def test_sessions_are_bounded_in_number_and_time():
    clock = Clock()
    sessions = Sessions(limit=3, idle=10, clock=clock)
    for name in "abcd":
        sessions.put(name, "e")
    assert len(sessions) == 3 and sessions.engine("a") == "" and sessions.engine("d") == "e"
    clock.now += 11
    assert sessions.engine("d") == ""


def test_consistent_hash_moves_few_keys_and_bounds_the_load():
    policy, fleet = ConsistentHash(), engines(*[0] * 8)
    infos = [RequestInfo(model="m", session=f"s{i}") for i in range(400)]
    before = {info.session: decide(policy, info, fleet, 0).engine_id for info in infos}
    after = {info.session: decide(policy, info, fleet[:-1], 0).engine_id for info in infos}
    moved = [name for name in before if before[name] != after[name]]
    assert {before[name] for name in moved} == {"e7"}
    hot = [engine._replace(in_flight=40) if engine.engine_id == before["s0"] else engine for engine in fleet]
    assert decide(policy, infos[0], hot, 0).engine_id != before["s0"]


def test_consistent_hash_sends_equal_beginnings_to_one_engine():
    policy, fleet = ConsistentHash(), engines(*[0] * 8)
    shared = list(range(256))
    picked = {
        decide(
            policy, RequestInfo(model="m", prompt=TokenPrompt(tokens=pack([*shared, i]))), fleet, i
        ).engine_id
        for i in range(20)
    }
    assert len(picked) == 1


@pytest.mark.parametrize("name", ["approximate-prefix", "predicted-ttft"])
def test_a_prompt_goes_where_its_beginning_is_unless_that_is_far_busier(name: str):
    decider = Decider(load_policy(name))
    ledgers = [Ledger(letter) for letter in "abcd"]
    if (index := decider.index("m")) is not None:
        index.stored("z", [(1, 1)], block_size=128)  # the block size becomes known
    start = list(range(20_000))
    info = RequestInfo(model="m", prompt_tokens=20_000, prompt=TokenPrompt(tokens=pack(start)))
    claim = decider.choose("m", info, ledgers, 5.0)
    claim.started()
    claim.ended()
    longer = RequestInfo(
        model="m", prompt_tokens=20_100, prompt=TokenPrompt(tokens=pack([*start, *range(100)]))
    )
    again = decider.choose("m", longer, ledgers, 5.0)
    assert again.engine_id == claim.engine_id and again.cached_tokens == 19_968
    again.ended()
    busy = next(ledger for ledger in ledgers if ledger.engine_id == claim.engine_id)
    busy.sent(400_000, 400_000.0 * 20_000)
    assert decider.choose("m", longer, ledgers, 5.0).engine_id != claim.engine_id


def test_a_claim_counts_what_must_be_computed_and_comes_back_to_zero():
    decider = Decider(load_policy("predicted-ttft"))
    ledger = Ledger("a")
    claims = [decider.choose("m", RequestInfo(model="m", prompt_tokens=n), [ledger], 5.0) for n in (0, 7)]
    assert (ledger.in_flight, ledger.queued, ledger.queued_tokens) == (2, 2, 1031)
    for claim in claims:
        claim.started()
        claim.started()
        assert claim.ended() and not claim.ended()
    assert (ledger.in_flight, ledger.queued, ledger.queued_tokens) == (0, 0, 0)
    assert ledger.load(5.0).queued_pairs == 0.0


def test_every_policy_decides_without_any_knowledge():
    for name in known_policies():
        claim = Decider(load_policy(name)).choose(
            "m", RequestInfo(model="m"), [Ledger("a"), Ledger("b")], 5.0
        )
        assert claim.engine_id in "ab"


def test_a_pushed_report_counts_as_asked_for_a_little_earlier():
    clock = Clock()
    ledger = Ledger("a", clock)
    clock.now = 10.0
    ledger.sent(500)
    clock.now = 10.05
    ledger.take(LoadReport(), ledger.mark_before(0.1))  # left before the request arrived
    assert ledger.load(5.0).waiting_tokens() == 500
    clock.now = 11.0
    ledger.take(LoadReport(waiting_tokens=500), ledger.mark_before(0.1))
    assert ledger.load(5.0).waiting_tokens() == 500 and ledger.load(5.0).tokens_since == 0


def learn(book: PaceBook, truth: Pace, engine: str, count: int, slow: float = 1.0) -> None:
    rng = random.Random(5)
    for _ in range(count):
        tokens, decoding = rng.uniform(100, 60_000), rng.randrange(80)
        pairs = tokens * rng.uniform(0, 40_000)
        seconds = (
            truth.base + truth.token * tokens + truth.token_decode * tokens * decoding + truth.pair * pairs
        )
        book.learn(engine, Sight(tokens, decoding, pairs), slow * seconds * rng.uniform(0.9, 1.1))


def test_a_pace_is_learnt_and_a_slow_engine_is_seen():
    truth = Pace(0.03, 7e-5, 4e-7, 3e-9, True)
    book = PaceBook()
    assert book.of("a") == ASSUMED
    learn(book, truth, "a", 300)
    for learnt, real in zip(book.of("new")[1:4], truth[1:4], strict=True):
        assert learnt == pytest.approx(real, rel=0.3)
    learn(book, truth, "slow", 60, slow=3.0)
    assert 1.8 < book.of("slow").token / book.of("a").token < 3.5
    fleet = [EngineLoad("slow", pace=book.of("slow")), EngineLoad("a", pace=book.of("a"))]
    assert decide(PredictedTtft(), REQUEST, fleet, 0).engine_id == "a"
    book.forget("slow")
    assert book.of("slow").token == pytest.approx(book.of("new").token)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 500), st.floats(0, 1e11), st.floats(0, 1e4)), max_size=60
    )
)
def test_whatever_is_seen_a_pace_stays_usable(sights):
    book = PaceBook()
    for tokens, decoding, pairs, seconds in sights:
        book.learn("a", Sight(tokens, decoding, pairs), seconds)
    pace = book.of("a")
    assert all(0 <= value < float("inf") for value in pace[:4]) and pace.token > 0
    wait, own = predict(REQUEST, EngineLoad("a", queued_tokens=100, pace=pace))
    assert wait >= 0 and 0 < own < float("inf")


def test_stale_reports_fall_back_to_own_counts():
    clock = Clock()
    decider = Decider(load_policy("predicted-ttft"), clock)
    busy, idle = Ledger("busy", clock), Ledger("idle", clock)
    busy.take(LoadReport(waiting_tokens=10**6, waiting=50), busy.mark())
    assert decider.choose("m", REQUEST, [busy, idle], 5.0).engine_id == "idle"
    clock.now += 6
    idle.sent(50_000)
    assert decider.choose("m", REQUEST, [busy, idle], 5.0).engine_id == "busy"


def test_of_a_large_fleet_the_holders_of_the_prompt_and_some_others_are_looked_at():
    decider = Decider(load_policy("predicted-ttft"))
    index = decider.index("m")
    assert index is not None
    ledgers = [Ledger(f"e{number:04d}") for number in range(1000)]
    prompt = TokenPrompt(tokens=pack(range(20_000)))
    keys = prompt.keys(128)
    for ledger in ledgers:  # all hold the beginning, one nearly everything
        count = 150 if ledger.engine_id == "e0777" else 4
        index.stored(ledger.engine_id, [(key, key) for key in keys[:count]], block_size=128)
    info = RequestInfo(model="m", prompt_tokens=20_000, prompt=prompt)
    seen = decider.look("m", info, ledgers, 5.0)
    assert len(seen) <= 64 and {load.cached_tokens for load in seen} == {150 * 128, 4 * 128}
    assert decider.choose("m", info, ledgers, 5.0).engine_id == "e0777"
    fresh = RequestInfo(model="m", prompt_tokens=300, prompt=TokenPrompt(tokens=pack(range(7, 307))))
    picked = [decider.choose("m", fresh, ledgers, 5.0).engine_id for _ in range(300)]
    assert max(Counter(picked).values()) < 12


async def test_what_is_known_of_caches_is_told_as_metrics():
    from .router_fakes import FakeEngine, fleet, generate_request, tokens_of, until

    async with fleet(FakeEngine(name="a"), policy="predicted-ttft") as running:
        await until(lambda: running.router.picker.events.following == {"a"})
        await tokens_of(running.stub.Generate(generate_request()))
        assert running.metric("npufleet_router_engine_events", model="tiny", engine="a") == 1
        index = running.router.picker.decider.index("tiny")
        assert index is not None
        index.stored("a", [(1, 1), (2, 2)], block_size=128)
        assert running.metric("npufleet_router_prefix_blocks", model="tiny") == 2
        assert running.metric("npufleet_router_engine_prefix_blocks", model="tiny", engine="a") == 2
        await running.engines[0].stop()
        await until(lambda: not running.router.picker.events.following)
        assert running.metric("npufleet_router_engine_prefix_blocks", model="tiny", engine="a") == 0
    async with fleet(FakeEngine(name="a"), policy="least-load") as running:
        assert not running.router.picker.events.following
        assert running.metric("npufleet_router_engine_events", model="tiny", engine="a") == 0
