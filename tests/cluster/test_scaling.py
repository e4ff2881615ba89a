"""How many engines: rules that hold for any load, and whole days of load on simulated engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.scaling.bounds import Bounds, Objectives, parse
from npufleet.cluster.scaling.policy import DOWN_AFTER_S, HIGH, LOW, Decision, Load, Memory, decide, press

BOUNDS = Bounds(min=1, max=8, objectives=Objectives(ttft_p90=2.0, tpot_p90=0.05))

loads = st.builds(
    Load,
    ready=st.integers(0, 9),
    starting=st.integers(0, 4),
    running=st.integers(0, 99),
    waiting=st.integers(0, 999),
    refused=st.integers(0, 9),
    kv_usage=st.floats(0, 1),
    ttft_p90=st.none() | st.floats(0, 100),
    tpot_p90=st.none() | st.floats(0, 10),
    start_s=st.floats(1, 2000),
)
times = st.none() | st.floats(0, 1000)
memories = st.builds(
    Memory, high_since=times, low_since=times, idle_since=times, waiting=st.integers(0, 999), looked=times
)
bounds = st.tuples(st.integers(0, 4), st.integers(1, 8)).map(lambda t: Bounds(min=min(t), max=max(t)))


@given(bounds, st.integers(0, 9), loads, memories)
def test_any_decision_is_within_bounds_and_tells_why(b: Bounds, wanted: int, load: Load, m: Memory) -> None:
    made = decide(b, wanted, load, m, 1000.0)
    assert b.min <= made.engines <= b.max
    assert (made.engines == wanted) == (made.why == "")
    assert made.engines <= max(2 * wanted, 1, b.min)


@given(st.integers(1, 8), loads, memories, st.integers(0, 500))
def test_more_load_never_means_fewer_engines(wanted: int, load: Load, m: Memory, more: int) -> None:
    other = replace(load, waiting=load.waiting + more)
    assert press(BOUNDS, other, m, 1000.0)[0] >= press(BOUNDS, load, m, 1000.0)[0]
    assert decide(BOUNDS, wanted, other, m, 1000.0).engines >= decide(BOUNDS, wanted, load, m, 1000.0).engines


@given(st.integers(1, 8), loads, memories)
def test_no_engine_ends_while_the_rest_could_not_do(wanted: int, load: Load, m: Memory) -> None:
    made = decide(BOUNDS, wanted, load, m, 1000.0)
    if made.engines < wanted <= BOUNDS.max:
        assert press(BOUNDS, load, m, 1000.0)[0] * load.ready < LOW * (wanted - 1) < HIGH * wanted


def test_a_model_asleep_wakes_for_a_request() -> None:
    asleep = Bounds(min=0, max=2)
    assert decide(asleep, 0, Load(ready=0), Memory(), 0.0).engines == 0
    assert decide(asleep, 0, Load(ready=0, refused=1), Memory(), 0.0).why == "1 requests found no engine"


def test_bounds_are_read_and_refused() -> None:
    made = parse({"min": 0, "max": 4, "objectives": {"ttft_p90": "2s", "tpot_p90": "50ms"}}, "e")
    assert made == Bounds(min=0, max=4, objectives=Objectives(ttft_p90=2.0, tpot_p90=0.05))
    assert parse(made.to_dict(), "e") == made
    for wrong, text in (
        ({"min": 3, "max": 2}, "min is 3, above max, which is 2"),
        ({"min": 1}, "e.max: expected an integer"),
        ({"max": 2, "objectives": {"ttft_p90": "soon"}}, "a time such as 50ms or 2s"),
        ({"max": 2, "objectives": {"ttft": 1}}, "did you mean 'ttft_p90'"),
    ):
        with pytest.raises(ValueError, match=text):
            parse(wrong, "e")


@dataclass
class Simulation:
    """Engines that each end ``rate`` requests a second, take ``start_s`` to start, and share one queue."""

    offered: Callable[[float], float]  # requests a second at a time
    rate: float = 2.0
    start_s: float = 60.0
    bounds: Bounds = BOUNDS
    wanted: int = 1
    ready: int = 1
    starting: list[float] = field(default_factory=list)  # when they will be ready
    queue: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)
    longest: float = 0.0
    engine_seconds: float = 0.0

    def run(self, seconds: float, tick: float = 5.0) -> Simulation:
        memory, now = Memory(), 0.0
        while now < seconds:
            self.ready += sum(at <= now for at in self.starting)
            self.starting = [at for at in self.starting if at > now]
            capacity = self.ready * self.rate * tick
            work = self.queue + self.offered(now) * tick
            self.queue = max(0.0, work - capacity)
            self.longest = max(self.longest, self.queue)
            self.engine_seconds += (self.ready + len(self.starting)) * tick
            made = self._decide(min(work, capacity), memory, now)
            memory = made.memory
            if made.engines != self.wanted:
                self.changes.append((now, made.engines))
                self._apply(made.engines, now)
            now += tick
        return self

    def _decide(self, served: float, memory: Memory, now: float) -> Decision:
        usage = served / max(1e-9, self.ready * self.rate * 5.0) if self.ready else 0.0
        load = Load(
            ready=self.ready, starting=len(self.starting), running=math.ceil(usage * self.ready),
            waiting=round(self.queue), refused=0 if self.ready else math.ceil(self.queue),
            kv_usage=min(1.0, 0.8 * usage), ttft_p90=0.2 + self.queue / max(1e-9, self.ready * self.rate),
            start_s=self.start_s,
        )  # fmt: skip
        return decide(self.bounds, self.wanted, load, memory, now)

    def _apply(self, engines: int, now: float) -> None:
        more = engines - self.ready - len(self.starting)
        self.starting += [now + self.start_s] * max(0, more)
        self.ready += min(0, more)
        self.wanted = engines


@pytest.mark.parametrize("rate", [1.0, 3.0, 7.0, 11.0])
def test_a_steady_load_settles(rate: float) -> None:
    simulation = Simulation(offered=lambda now: rate).run(7200)
    late = [at for at, _ in simulation.changes if at > 3600]
    assert late == [], f"still changing after an hour: {simulation.changes}"
    assert simulation.queue == 0.0
    assert math.ceil(rate / 2.0) <= simulation.ready <= math.ceil(rate / 2.0 / LOW) + 1


def test_a_step_is_followed_up_and_down() -> None:
    simulation = Simulation(offered=lambda now: 9.0 if 600 <= now < 3000 else 1.0).run(7200)
    assert max(engines for _, engines in simulation.changes) >= 5
    assert simulation.wanted == 1, "when the load has gone, so have the engines"
    up = [at for at, engines in simulation.changes if engines > 1]
    assert 600 <= up[0] <= 630, "it does not wait for long"
    down = [at for at, engines in simulation.changes if at > 3000]
    assert down[0] >= 3000 + DOWN_AFTER_S and len(down) <= 7


def test_a_slow_start_is_begun_earlier() -> None:
    def ramp(now: float) -> float:
        return min(12.0, 1.0 + now / 120)

    quick, slow = (Simulation(offered=ramp, start_s=s).run(1800) for s in (20.0, 300.0))
    overload = next(at for at in range(1800) if ramp(at) > 2.0)
    assert slow.changes[0][0] <= quick.changes[0][0] <= overload + 60
    assert slow.changes[1][1] >= quick.changes[1][1]


def test_a_wave_is_not_followed_up_and_down_all_day() -> None:
    simulation = Simulation(offered=lambda now: 5.0 + 4.0 * math.sin(now / 60)).run(7200)
    assert len(simulation.changes) <= 8, simulation.changes
    always = Simulation(offered=lambda now: 5.0, wanted=8, ready=8, bounds=Bounds(min=8, max=8)).run(7200)
    assert simulation.engine_seconds < always.engine_seconds


def test_to_zero_and_back() -> None:
    asleep = Bounds(min=0, max=4)
    simulation = Simulation(offered=lambda now: 0.0 if now < 3600 else 1.0, bounds=asleep).run(5400)
    assert [engines for _, engines in simulation.changes][:2] == [0, 1]
    assert simulation.changes[1][0] <= 3605
    assert simulation.queue == 0.0
