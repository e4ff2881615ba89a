"""The simulator's parts: device times, block pool, block-level engine, the fleet under a virtual clock."""

from __future__ import annotations

import pytest

from npufleet.cluster.bench.trace import TRACE_BLOCK, conversations, read, reuse, tokens, write
from npufleet.cluster.router.prefix.prompt import chain
from npufleet.cluster.router.registry import known_policies, load_policy
from npufleet.cluster.sim.base import SimRequest, Step
from npufleet.cluster.sim.blocks import BlockCore
from npufleet.cluster.sim.fleet import Arrival, FleetSpec, Record, VirtualFleet, capacity
from npufleet.cluster.sim.pool import BlockPool
from npufleet.cluster.sim.timing import PRESETS, DeviceTime, preset

SMALL = DeviceTime(
    base=0.01, weights=0.0, token=1e-4, pair=0.0, context=1e-7, kv_tokens=32_768, max_batched_tokens=2048
)


class Keyed:
    """A prompt whose blocks are known by ids."""

    def __init__(self, length: int, ids: tuple[int, ...]) -> None:
        self.length = length
        self.ids = ids
        made, parent = [], 0
        for one in ids[: length // TRACE_BLOCK]:
            parent = chain(parent, one.to_bytes(8, "big"))
            made.append(parent)
        self._keys = tuple(made)

    def keys(self, block_size: int) -> tuple[int, ...]:
        assert block_size == TRACE_BLOCK
        return self._keys

    def anchor(self, tokens: int) -> bytes:
        return str(self.ids[:1]).encode()


def workload(count: int, rate: float) -> list[Arrival]:
    trace = conversations(sessions=count // 5, turns=5, rate=rate)
    return [
        Arrival(
            at=one.at,
            prompt=Keyed(one.prompt_tokens, one.hash_ids),
            output_tokens=one.output_tokens,
            session=one.session,
        )
        for one in trace
    ]


def run(policy: str, **spec) -> list[Record]:
    fleet = VirtualFleet(FleetSpec(engines=4, device=SMALL, **spec), lambda: load_policy(policy))
    return fleet.run(workload(200, 12.0))


def serve(
    core: BlockCore, *requests: SimRequest
) -> tuple[float, dict[str, tuple[float, int]], dict[str, float]]:
    for request in requests:
        core.add(request)
    now, started, ended = 0.0, {}, {}
    while core.busy:
        step = core.begin()
        now += step.seconds(step.steps)
        outcome = core.end(step.steps)
        started.update({name: (now, cached) for name, cached in outcome.started})
        ended.update(dict.fromkeys(outcome.finished, now))
    return now, started, ended


def request(name: str, prompt: int, output: int, keys: tuple[int, ...] = ()) -> SimRequest:
    return SimRequest(request_id=name, prompt_tokens=prompt, output_tokens=output, keys=keys)


@pytest.mark.parametrize(
    ("name", "requests", "published"), [("a2-qwen3-32b-tp4", 72, 1065.0), ("a3-qwen3-32b-tp4", 76, 1249.0)]
)
def test_presets_give_the_published_throughput(name: str, requests: int, published: float):
    """vllm-ascend's nightly gates: 3.5K tokens in, 1.5K out, at that many requests at once."""
    core = BlockCore(preset(name), 128)
    for number in range(requests):
        core.add(request(str(number), 3500, 1500))
    now, ended, begun, added = 0.0, 0, (0.0, 0), requests
    while ended < 4 * requests:
        step = core.begin()
        now += step.seconds(step.steps)
        for _ in core.end(step.steps).finished:
            ended += 1
            added += 1
            core.add(request(str(added), 3500, 1500))
            if ended == requests:
                begun = (now, ended)
    assert (ended - begun[1]) * 1500 / (now - begun[0]) == pytest.approx(published, rel=0.02)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'a2-qwen3-32b-tp4'"):
        preset("a2-qwen3-32b")
    assert all(device.slowed(2).step(100, 0, 0, 0) > device.step(100, 0, 0, 0) for device in PRESETS.values())


def test_runs_of_steps_take_what_single_steps_take():
    step = Step(5, 0.1, 0.01)
    assert step.seconds(3) == pytest.approx(0.1 + 0.11 + 0.12)
    assert [step.done_by(seconds) for seconds in (0.0, 0.1, 0.1001, 0.33, 99)] == [1, 1, 2, 3, 5]


def test_the_pool_gives_up_the_longest_unused_and_children_first():
    pool = BlockPool(4)
    first = pool.take(2)
    assert [pool.cache(block, key) for block, key in zip(first, (1, 2), strict=True)] == [True, True]
    pool.release(first)
    assert pool.free == 4 and len(pool.prefix((1, 2, 3), 9)) == 2
    again = pool.take(3)
    assert pool.removed == [2] and len(pool.prefix((1, 2), 9)) == 1
    assert not pool.cache(again[0], 1)  # another block has it already
    pool.release(again)
    assert pool.free == 4


def test_one_request_takes_what_the_model_says():
    core = BlockCore(SMALL, 512)
    _, started, ended = serve(core, request("a", 3000, 3))
    prefill = SMALL.step(2048, 0, 0, 0) + SMALL.step(952, 0, 0, 0)
    decode = SMALL.step(0, 0, 1, 3001) + SMALL.step(0, 0, 1, 3002)
    assert started["a"] == (pytest.approx(prefill), 0) and ended["a"] == pytest.approx(prefill + decode)
    assert core.load().kv_usage == 0.0 and not core.busy


def test_a_prefix_is_found_but_never_the_last_token():
    core = BlockCore(SMALL, 512)
    keys = (11, 12, 13)
    serve(core, request("a", 1536, 2, keys))
    _, started, _ = serve(core, request("b", 1536, 2, keys), request("c", 1600, 2, keys))
    assert started["b"][1] == 1024 and started["c"][1] == 1536


def test_requests_that_do_not_fit_together_are_preempted_and_still_end():
    small = DeviceTime(base=0.01, weights=0, token=1e-4, pair=0, context=0, kv_tokens=512 * 9)
    core = BlockCore(small, 512)
    _, started, ended = serve(core, *(request(str(n), 1500, 600) for n in range(3)))
    assert len(started) == len(ended) == 3 and core.load().kv_usage == 0.0
    with pytest.raises(ValueError, match="tokens of KV cache"):
        core.add(request("big", 10_000, 1))


def test_an_abort_frees_everything():
    core = BlockCore(SMALL, 512)
    core.add(request("a", 3000, 50))
    core.add(request("b", 3000, 50))
    core.begin()
    for name in ("a", "b", "unknown"):
        core.abort(name)
    core.end(1)
    assert not core.busy and core.load().kv_usage == 0.0


@pytest.mark.parametrize("policy", known_policies())
def test_every_policy_serves_a_workload_to_its_end(policy: str):
    records = run(policy)
    assert all(0 <= r.arrival.at < r.first <= r.end and not r.failed for r in records)
    assert all(0 <= r.cached < r.arrival.prompt.length for r in records)


def test_a_run_is_deterministic():
    first, second = ([(r.engine, r.first, r.end, r.cached) for r in run("predicted-ttft")] for _ in range(2))
    assert first == second


def test_knowing_the_caches_pays():
    mean = {
        policy: sum(r.first - r.arrival.at for r in run(policy)) / 200
        for policy in ("round-robin", "least-load", "precise-prefix", "predicted-ttft")
    }
    assert mean["predicted-ttft"] < 0.7 * mean["least-load"] < mean["round-robin"]
    assert mean["precise-prefix"] < 0.7 * mean["least-load"]


def test_many_routers_and_late_events_are_served_too():
    for spec in ({"routers": 4}, {"event_lag": 2.0}, {"routers": 16, "event_lag": 2.0}):
        records = run("predicted-ttft", **spec)
        assert all(r.end > 0 for r in records)
        assert sum(r.cached for r in records) > 0.15 * sum(r.arrival.prompt.length for r in records)


def test_a_slow_engine_gets_less():
    records = run("predicted-ttft", slow=(0,), slow_factor=5.0)
    share = sum(r.engine == "e0.0" for r in records) / len(records)
    assert share < 0.15


def test_requests_of_a_dead_engine_are_served_by_others_and_its_successor_begins_empty():
    records = run("predicted-ttft", kill=(0, 5.0, 8.0))
    assert sum(r.failed for r in records) < 20
    assert all(r.end > 0 or r.failed for r in records)
    assert any(r.engine == "e0.1" for r in records)
    assert not any(r.engine == "e0.0" and r.arrival.at > 5.0 for r in records)


def test_routers_refuse_what_would_be_late_and_others_come_sooner():
    everything, gated = (
        VirtualFleet(
            FleetSpec(engines=2, device=SMALL, ttft_objective=objective),
            lambda: load_policy("predicted-ttft"),
        ).run(workload(200, 12.0))
        for objective in (0.0, 1.0)
    )
    assert not any(record.refused for record in everything)
    refused = [record for record in gated if record.refused]
    assert 0 < len(refused) < 100
    assert all(record.first < 0 and not record.tries for record in refused)

    def waits(records: list[Record]) -> list[float]:
        return [record.first - record.arrival.at for record in records if not record.refused]

    assert max(waits(gated)) < max(waits(everything)) / 3
    assert sum(wait <= 1.0 for wait in waits(gated)) > sum(wait <= 1.0 for wait in waits(everything))


def test_capacity_is_what_the_engines_complete():
    spec = FleetSpec(engines=2, device=SMALL)
    assert capacity(spec, workload(200, 1.0)) == pytest.approx(
        0.5 * capacity(FleetSpec(engines=4, device=SMALL), workload(200, 1.0)), rel=0.35
    )


def test_a_trace_survives_writing_and_reading(tmp_path):
    made = conversations(sessions=6, turns=4, rate=5.0)
    write(tmp_path / "t.jsonl", made)
    back = read(tmp_path / "t.jsonl")
    assert [(r.prompt_tokens, r.output_tokens, r.hash_ids) for r in back] == [
        (r.prompt_tokens, r.output_tokens, r.hash_ids) for r in made
    ]
    assert back[0].at == 0.0 and 0.4 < reuse(back) < 0.9
    turns = [r for r in made if r.session == made[0].session]
    first, second = (tokens(r, n, 250) for n, r in enumerate(turns[:2]))
    shared = sum(a == b for a, b in zip(turns[0].hash_ids, turns[1].hash_ids, strict=False)) * TRACE_BLOCK
    assert first[:shared] == second[:shared] and len(second) == turns[1].prompt_tokens


def test_plain_lengths_are_read_and_errors_name_the_line(tmp_path):
    csv = tmp_path / "a.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    one, two = read(csv)
    assert (one.prompt_tokens, two.output_tokens, one.hash_ids) == (4808, 8, ())
    assert two.at == pytest.approx(0.052)
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2"):
        read(bad)
    with pytest.raises(ValueError, match="no such trace"):
        read(tmp_path / "none.jsonl")
