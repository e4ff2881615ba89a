"""Engines that die: the next one's wait, and NPUs that are to blame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.controller import deaths
from npufleet.cluster.controller.deaths import Death, to_fence, wait_before_start
from npufleet.cluster.controller.health import Health
from npufleet.cluster.endpoints import EngineEndpoint


def death(at: float, *npus: str, model: str = "m") -> Death:
    return Death(at=at, model=model, engine_id="e", why="it fell", npus=npus)


def test_waits_grow_and_end() -> None:
    fallen = [death(float(at)) for at in range(6)]
    assert [wait_before_start(fallen[:n], "m", n - 1.0) for n in range(7)] == [0, 0, 0, 5, 10, 20, 40]
    assert wait_before_start(fallen, "other", 5.0) == 0
    assert wait_before_start(fallen, "m", 46.0) == 0
    assert wait_before_start([death(0.0)] * 40, "m", 0.0) == deaths.LONGEST_WAIT_S
    assert wait_before_start([death(0.0)] * 40, "m", deaths.WINDOW_S + 1) == 0


def test_engines_that_lived_for_a_while_are_no_crash_loop() -> None:
    old = [Death(at=float(at), model="m", engine_id="e", why="", lived=deaths.YOUNG_S) for at in range(9)]
    assert wait_before_start(old, "m", 9.0) == 0


def test_an_npu_that_kills_is_fenced_and_freed_again() -> None:
    bad = [death(0.0, "n:3"), death(1.0, "n:3"), death(2.0, "n:3")]
    assert to_fence(bad[:2], 2.0) == frozenset()
    assert to_fence(bad, 2.0) == {"n:3"}
    assert to_fence([*bad, death(3.0, "n:4")], 3.0) == {"n:3"}
    assert to_fence(bad, deaths.WINDOW_S + 3.0) == frozenset()


def test_a_model_that_dies_everywhere_fences_nothing() -> None:
    everywhere = [death(float(at), f"n:{at % 2}") for at in range(8)]
    assert to_fence(everywhere, 8.0) == frozenset()


@given(
    st.lists(
        st.tuples(st.floats(0, 2000), st.sampled_from("ab"), st.sets(st.sampled_from("0123"), max_size=4)),
        max_size=30,
    ),
    st.floats(0, 2000),
)
def test_rules_hold_for_any_history(history: list[tuple[float, str, set[str]]], now: float) -> None:
    fallen = [death(min(at, now), *npus, model=model) for at, model, npus in history]
    for model in "ab":
        wait = wait_before_start(fallen, model, now)
        assert 0 <= wait <= deaths.LONGEST_WAIT_S
        assert wait_before_start([*fallen, death(now, model=model)], model, now) >= wait
    for npu in to_fence(fallen, now):
        blamed = [d for d in deaths.recent(fallen, now) if npu in d.npus]
        assert len(blamed) >= deaths.FENCE_AFTER


def test_health_blames_the_ranks_that_failed_and_tells_why_a_start_waits() -> None:
    now = 100.0
    health = Health(clock=lambda: now, wall_clock=lambda: 5000.0)
    endpoint = EngineEndpoint(
        engine_id="e", model="m", address="h:1", metrics_url="", places=("n:0", "n:1"), ready_at=4990.0
    )
    health.died(endpoint, "rank 1 fell", ranks=(1,))
    health.died(endpoint, "it fell")
    assert health.wait("m") == (0.0, "")
    health.died(endpoint, "it fell again")
    seconds, why = health.wait("m")
    assert seconds == 5.0
    assert why == (
        "3 engines of it died soon after their start within 15 minutes, the last one because it fell again; "
        "the next starts in 5 s"
    )
    told = health.to_dict()
    assert [entry["why"] for entry in told["deaths"]] == ["rank 1 fell", "it fell", "it fell again"]
    assert told["fenced"] == ["n:1"], "n:0 was there twice only"
    assert [sorted(d.npus) for d in health._deaths] == [["n:1"], ["n:0", "n:1"], ["n:0", "n:1"]]


class Clocks:
    """A process's clock and the world's."""

    def __init__(self) -> None:
        self.now = 100.0

    def health(self, process_began: float = 0.0) -> Health:
        return Health(clock=lambda: self.now - process_began, wall_clock=lambda: self.now + 1e9)


def fell(ready_at: float, *places: str) -> EngineEndpoint:
    return EngineEndpoint(
        engine_id="e", model="m", address="h:1", metrics_url="", ready_at=ready_at, places=places
    )


def test_the_time_that_an_engine_was_ready_counts() -> None:
    clocks = Clocks()
    health = clocks.health()
    for _ in range(5):
        health.died(fell(1e9 + clocks.now - deaths.YOUNG_S - 1, "n:0", "n:1"), "it fell")
    assert health.wait("m") == (0.0, "")
    for _ in range(3):
        health.died(fell(1e9 + clocks.now - 1.0), "it fell")
    seconds, why = health.wait("m")
    assert seconds == deaths.FIRST_WAIT_S and "3 engines of it died soon after their start" in why


def test_a_fence_outlives_the_controller_and_ends_when_it_would_have_ended() -> None:
    clocks = Clocks()
    first = clocks.health()
    for second in range(3):
        clocks.now = 100.0 + second
        first.died(fell(0.0, "n:3"), "it fell")
    kept = first.fences()
    assert kept == {"n:3": 1e9 + 100.0 + deaths.WINDOW_S}
    clocks.now = 200.0
    second_life = clocks.health(process_began=150.0)
    assert second_life.fenced() == frozenset()
    second_life.remember(kept)
    assert second_life.fenced() == first.fenced() == {"n:3"}
    clocks.now = 100.5 + deaths.WINDOW_S
    assert second_life.fenced() == first.fenced() == frozenset()
