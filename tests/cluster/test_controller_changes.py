"""A change of a running fleet, followed to its end, taken back, overtaken, or gone on with after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from npufleet.cluster import config
from npufleet.cluster.controller import changes as changes_module
from npufleet.cluster.controller.changes import Changes, ChangeState
from npufleet.cluster.controller.outcome import Look, outcome
from npufleet.cluster.controller.progress import EngineProgress, Phase
from npufleet.cluster.deploy.wish import Wish, generation
from npufleet.cluster.endpoints import EngineEndpoint, EngineState


def wish(engines: int = 1, **engine: Any) -> Wish:
    model = {"name": "m", "source": "/m", "engines": engines, "engine": engine}
    return Wish.of(config.from_dict({"models": [model]}))


def gen(of: Wish) -> str:
    return generation(of.config, of.config.models[0])


def engine(name: str, generation: str, state: EngineState = EngineState.READY, model: str = "m") -> Any:
    return EngineEndpoint(
        engine_id=name, model=model, address="h:1", metrics_url="", state=state, generation=generation
    )


def start(generation: str, phase: Phase, detail: str = "") -> EngineProgress:
    return EngineProgress(engine_id="e", model="m", phase=phase, detail=detail, generation=generation)


class Fleet:
    """What the controller would see, set by the test; remembers what was submitted."""

    def __init__(self, present: Wish) -> None:
        self.submitted: list[tuple[Wish, Mapping[str, int]]] = []
        self.there = Look(endpoints=(engine("old", gen(present)),), progress=())
        self.changes = Changes(wish=present, submit=self._submit, room=self._room, look=self._look)

    async def _submit(self, wish: Wish, surge: Mapping[str, int]) -> None:
        self.submitted.append((wish, surge))

    async def _room(self, wish: Wish) -> Mapping[str, int]:
        return {"m": 1}

    async def _look(self, began: float) -> Look:
        return self.there

    async def until(self, state: ChangeState) -> None:
        for _ in range(4000):
            if self.changes.change is not None and self.changes.change.state is state:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"never {state}: {self.changes.change}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "FOLLOW_S", 0.005)


async def test_a_rolling_update_is_followed_to_its_end() -> None:
    before, after = wish(), wish(max_num_seqs=4)
    fleet = Fleet(before)
    assert [step.kind for step in await fleet.changes.apply(after)] == ["roll"]
    await fleet.until(ChangeState.APPLYING)
    await asyncio.sleep(0.05)
    assert fleet.changes.change is not None
    assert fleet.changes.change.detail == "m: 0 of 1 engines ready"
    under_way, surge = fleet.submitted[0]
    assert under_way.previous == before and surge == {"m": 1}
    old = engine("old", gen(before), EngineState.DRAINING)
    fleet.there = Look(endpoints=(old, engine("new", gen(after))), progress=())
    await asyncio.sleep(0.05)
    assert fleet.changes.change.detail == "m: 1 engines drain"
    fleet.there = Look(endpoints=(engine("new", gen(after)),), progress=())
    await fleet.until(ChangeState.DONE)
    assert fleet.submitted[-1][0] == after == fleet.changes.wish


async def test_a_generation_that_cannot_start_is_taken_back() -> None:
    before, after = wish(), wish(max_num_seqs=4)
    fleet = Fleet(before)
    await fleet.changes.apply(after)
    fleet.there = Look(
        endpoints=(engine("old", gen(before)),), progress=(start(gen(after), Phase.REFUSED, "no such rope"),)
    )
    await fleet.until(ChangeState.ROLLED_BACK)
    assert fleet.changes.wish == before == fleet.submitted[-1][0]
    assert fleet.changes.change is not None
    assert fleet.changes.change.detail == "model 'm': no such rope"


async def test_a_second_change_overtakes_the_first_and_goes_back_before_both() -> None:
    before, first, second = wish(), wish(max_num_seqs=4), wish(max_num_seqs=5)
    fleet = Fleet(before)
    await fleet.changes.apply(first)
    await asyncio.sleep(0.02)
    await fleet.changes.apply(second)
    failed = start(gen(second), Phase.FAILED, "out of memory")
    fleet.there = Look(endpoints=(), progress=(failed, failed))
    await asyncio.sleep(0.05)
    fleet.there = Look(endpoints=(engine("old", gen(before)),), progress=())
    await fleet.until(ChangeState.ROLLED_BACK)
    assert fleet.changes.wish == before


async def test_a_restarted_controller_goes_on_with_the_change() -> None:
    before, after = wish(), wish(max_num_seqs=4)
    fleet = Fleet(before)
    fleet.changes.taken_over(Wish(config=after.config, engines=after.engines, previous=before))
    await fleet.until(ChangeState.APPLYING)
    fleet.there = Look(endpoints=(engine("new", gen(after)),), progress=())
    await fleet.until(ChangeState.DONE)
    assert fleet.changes.wish == after
    fleet.changes.taken_over(after)
    assert not fleet.changes.busy


async def test_scaling_by_hand_keeps_everything_else() -> None:
    fleet = Fleet(wish())
    await fleet.changes.apply(fleet.changes.wish.resized("m", 2))
    await asyncio.sleep(0.02)
    assert fleet.changes.wish.engines == {"m": 2}
    await fleet.changes.stop()


async def test_what_serve_was_not_told_is_still_to_be_done() -> None:
    fleet = Fleet(wish())

    async def away(told: Wish, surge: Mapping[str, int]) -> None:
        raise ConnectionError

    told, fleet.changes.submit = fleet.changes.submit, away
    with pytest.raises(ConnectionError):
        await fleet.changes.scale("m", 3)
    assert fleet.changes.wish.engines == {"m": 1}
    fleet.changes.submit = told
    await fleet.changes.scale("m", 3)
    assert [made.engines for made, _ in fleet.submitted] == [{"m": 3}]


def test_a_change_fails_only_for_what_it_brought() -> None:
    wanted = {"m": ("new", 1)}
    other = start("old", Phase.REFUSED, "old trouble")
    once = start("new", Phase.FAILED, "port taken")
    assert not outcome(wanted, Look(endpoints=(), progress=(other, once))).over
    assert outcome(wanted, Look(endpoints=(), progress=(once, once))).failed
    given_up = Look(endpoints=(), progress=(), given_up={"m": "three times"})
    assert outcome(wanted, given_up).detail == "model 'm': three times"
    assert not outcome({"m": ("new", 0)}, given_up).failed
    leaving = Look(endpoints=(engine("x", "g", model="gone"),), progress=())
    assert outcome({}, leaving).detail == "1 engines of removed models drain"
