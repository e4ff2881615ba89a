"""From vLLM's series and front ends' refusals to a decision."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram

from npufleet.cluster import config
from npufleet.cluster.controller.autoscale import LOOK_S, Autoscaler
from npufleet.cluster.controller.changes import Changes
from npufleet.cluster.controller.progress import EngineProgress, Phase, ProgressBoard
from npufleet.cluster.controller.registry import Registry
from npufleet.cluster.deploy.wish import Wish
from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.engine.load import TTFT, WINDOW_S, LoadMeter, percentile
from npufleet.cluster.scaling.policy import UP_AFTER_S


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_load_is_read_from_vllms_series() -> None:
    registry, clock = CollectorRegistry(), Clock()
    labels = ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "", labels, registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "", labels, registry=registry)
    ttft = Histogram(TTFT, "", labels, buckets=(0.1, 0.5, 1.0), registry=registry)
    for rank in ("0", "1"):
        running.labels("m", rank).set(3)
        usage.labels("m", rank).set(0.2 * (1 + int(rank)))
    meter = LoadMeter(registry=registry, clock=clock)
    told = meter.read()
    assert told["running"] == 6 and abs(told["kv_usage"] - 0.3) < 1e-9
    assert "ttft_p90" not in told
    for _ in range(10):
        ttft.labels("m", "0").observe(0.3)
    clock.now += 5
    assert meter.read()["ttft_p90"] == 0.5
    clock.now += WINDOW_S + 1
    meter.read()
    clock.now += 5
    assert "ttft_p90" not in meter.read(), "what came a minute ago counts no more"


def test_percentiles_of_buckets() -> None:
    infinite = float("inf")
    assert percentile({0.1: 9.0, 1.0: 10.0, infinite: 10.0}, {}, 0.9) == 0.1
    assert percentile({0.1: 8.0, 1.0: 10.0, infinite: 10.0}, {}, 0.9) == 1.0
    assert percentile({0.1: 0.0, 1.0: 0.0, infinite: 5.0}, {}, 0.9) == 2.0
    assert percentile({infinite: 5.0}, {infinite: 5.0}, 0.9) is None


class World:
    def __init__(self, engines: dict[str, Any]) -> None:
        fleet = config.from_dict({"models": [{"name": "m", "source": "/m", "engines": engines}]})
        self.clock = Clock()
        self.registry = Registry()
        self.progress = ProgressBoard()

        async def nothing(*args: Any) -> Any:
            return {}

        self.changes = Changes(wish=Wish.of(fleet), submit=nothing, room=nothing, look=nothing)
        self.scaler = Autoscaler(
            changes=self.changes, registry=self.registry, progress=self.progress, clock=self.clock
        )

    def engine(self, name: str, **load: float) -> None:
        endpoint = EngineEndpoint(
            engine_id=name, model="m", address="h:1", metrics_url="", state=EngineState.READY
        )
        self.registry.heartbeat(endpoint, self.clock.now)
        self.scaler.heard(name, load)

    async def look(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.clock.now += LOOK_S
            await self.scaler.look(self.changes.scale)


async def test_an_objective_that_is_missed_brings_engines() -> None:
    world = World({"min": 1, "max": 3, "objectives": {"ttft_p90": "1s"}})
    world.engine("a", running=8, waiting=0, kv_usage=0.1, ttft_p90=2.5)
    await world.look(UP_AFTER_S + 2 * LOOK_S)
    assert world.changes.wish.engines == {"m": 2}
    assert world.scaler.to_dict() == {"m": "1 -> 2: TTFT p90 is 2.5 s of 1"}
    await world.look(UP_AFTER_S + 2 * LOOK_S)
    assert world.changes.wish.engines == {"m": 2}, "the second is not even starting yet"


async def test_refusals_wake_a_model_and_starts_are_timed() -> None:
    world = World({"min": 0, "max": 3})
    await world.changes.scale("m", 0)
    world.scaler.refused("front", {"m": 4})
    assert world.scaler.load("m").refused == 4
    await world.look(LOOK_S)
    assert world.changes.wish.engines == {"m": 1}
    world.scaler.refused("front", {"m": 4})
    assert world.scaler.load("m").refused == 0, "the same count again is no new refusal"
    entry = EngineProgress(
        engine_id="a", model="m", phase=Phase.READY, seconds={"placing": 1.0, "core": 30.0}
    )
    world.progress.report(entry)
    assert world.scaler.load("m").start_s == 31.0
