"""The controller's parts: registry, progress, wire form, series, and how routers follow it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from npufleet.cluster import config
from npufleet.cluster.controller import source as source_module
from npufleet.cluster.controller.gone import closed
from npufleet.cluster.controller.health import Health
from npufleet.cluster.controller.progress import FAILED_S, EngineProgress, Phase, ProgressBoard
from npufleet.cluster.controller.progress import SILENT_S as START_SILENT_S
from npufleet.cluster.controller.registry import EXPIRY_S, SILENT_S, Registry
from npufleet.cluster.controller.series import ControllerSeries
from npufleet.cluster.controller.source import ControllerSource
from npufleet.cluster.controller.wire import (
    endpoint_from_dict,
    endpoint_to_dict,
    snapshot_from_dict,
    snapshot_to_dict,
)
from npufleet.cluster.deploy.wish import Wish
from npufleet.cluster.endpoints import EngineEndpoint, EngineState, Snapshot


def endpoint(engine: str = "a", state: EngineState = EngineState.READY, model: str = "m") -> EngineEndpoint:
    return EngineEndpoint(
        engine_id=engine, model=model, address="h:1", metrics_url="http://h:2/metrics", state=state
    )


def test_versions_grow_only_with_changes() -> None:
    registry = Registry()
    registry.heartbeat(endpoint(), 0.0)
    assert registry.version == 1
    registry.heartbeat(endpoint(), 1.0)
    assert registry.version == 1
    registry.heartbeat(endpoint(state=EngineState.DRAINING), 2.0)
    assert registry.version == 2
    registry.remove("a")
    registry.remove("a")
    assert registry.version == 3
    assert registry.snapshot().endpoints == ()
    assert Registry().epoch != registry.epoch


def test_silent_engines_expire() -> None:
    registry = Registry()
    registry.heartbeat(endpoint("a"), 0.0)
    registry.heartbeat(endpoint("b"), EXPIRY_S)
    assert registry.expire(EXPIRY_S) == ()
    assert [e.engine_id for e in registry.expire(EXPIRY_S + 1.0)] == ["a"]
    assert [e.engine_id for e in registry.snapshot().endpoints] == ["b"]


async def test_only_a_closed_port_proves_that_a_silent_engine_is_gone() -> None:
    registry = Registry()
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.socket() as closed_port:
        closed_port.bind(("127.0.0.1", 0))  # held by nobody else, and refusing
        for engine, port in (("busy", open_port), ("killed", closed_port), ("well", closed_port)):
            address = f"127.0.0.1:{port.getsockname()[1]}"
            registry.heartbeat(
                replace(endpoint(engine), address=address), SILENT_S if engine == "well" else 0.0
            )
        registry.heartbeat(replace(endpoint("lost"), address="no-such-host.invalid:1"), 0.0)
        silent = registry.silent(SILENT_S + 0.1)
        assert [e.engine_id for e in silent] == ["busy", "killed", "lost"]
        assert [e.engine_id for e in await closed(silent)] == ["killed"]


def test_set_state_of_an_unknown_engine() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="'x' is not registered; registered are none"):
        registry.set_state("x", EngineState.DRAINING)
    registry.heartbeat(endpoint(), 0.0)
    registry.set_state("a", EngineState.DRAINING)
    assert registry.snapshot().ready() == ()


async def test_a_watcher_is_woken_by_a_change_and_answered_without_one() -> None:
    registry = Registry()
    first = await registry.newer("", -1, 5.0)
    assert first.version == 0
    waiting = asyncio.create_task(registry.newer(first.epoch, first.version, 30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.heartbeat(endpoint(), 0.0)
    assert (await waiting).version == 1
    assert (await registry.newer(first.epoch, 1, 0.01)).version == 1


def test_wire_form_reads_back_and_forgives_newer_releases() -> None:
    made = Snapshot(epoch="e", version=3, endpoints=(endpoint(), endpoint("b", EngineState.DRAINING)))
    assert snapshot_from_dict(snapshot_to_dict(made)) == made
    assert endpoint_from_dict({**endpoint_to_dict(endpoint()), "later": 1}) == endpoint()


def test_progress_keeps_the_last_engines() -> None:
    board = ProgressBoard(keep=2)
    for name in "abc":
        board.report(EngineProgress(engine_id=name, model="m", phase=Phase.PLACING))
    board.report(EngineProgress(engine_id="b", model="m", phase=Phase.READY, seconds={"placing": 1.234}))
    assert [entry.engine_id for entry in board.all()] == ["c", "b"]
    assert board.all()[-1].to_dict()["seconds"] == {"placing": 1.23}
    board.remove("b")
    board.remove("b")
    assert [entry.engine_id for entry in board.all()] == ["c"]


def test_starts_that_say_nothing_any_more_are_forgotten_and_failures_are_shown_for_a_while() -> None:
    board = ProgressBoard()
    for name, phase in (("a", Phase.LOADING), ("b", Phase.FAILED), ("c", Phase.READY)):
        board.report(EngineProgress(engine_id=name, model="m", phase=phase, heard=1.0))
    board.expire(START_SILENT_S + 2.0)
    assert [entry.engine_id for entry in board.all()] == ["b", "c"]
    board.expire(FAILED_S + 2.0)
    assert [entry.engine_id for entry in board.all()] == ["c"]


def test_series_carry_fleet_device_and_state() -> None:
    registry = Registry()
    registry.heartbeat(endpoint(), 0.0)
    fleet = config.from_dict({"device": "virtual", "models": [{"name": "m", "source": "/m", "engines": 2}]})
    health = Health()
    health.died(endpoint(), "it fell")
    samples = {
        (sample.name, sample.labels.get("state")): (sample.value, sample.labels["device"])
        for family in ControllerSeries(lambda: Wish.of(fleet), registry, ProgressBoard(), health).collect()
        for sample in family.samples
    }
    assert samples["npufleet_engines_wanted", None] == (2.0, "virtual")
    assert samples["npufleet_engines", "ready"] == (1.0, "virtual")
    assert samples["npufleet_engines", "draining"] == (0.0, "virtual")
    assert samples["npufleet_engine_deaths_total", None] == (1.0, "virtual")
    assert samples["npufleet_npus_fenced", None] == (0.0, "virtual")


class FakeHandle:
    """A Serve handle whose `watch` gives the scripted snapshots, then waits for ever."""

    def __init__(self, snapshots: list[Snapshot | Exception]) -> None:
        self.snapshots = snapshots
        self.asked: list[tuple[str, int]] = []
        self.watch = self

    async def remote(self, epoch: str, version: int) -> dict[str, Any]:
        self.asked.append((epoch, version))
        if not self.snapshots:
            await asyncio.Event().wait()
        answer = self.snapshots.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return snapshot_to_dict(answer)


async def take(source: AsyncIterator[Snapshot], count: int) -> list[Snapshot]:
    return [await asyncio.wait_for(anext(source), 5.0) for _ in range(count)]


def snapshot(epoch: str, version: int, *engines: str) -> Snapshot:
    return Snapshot(epoch=epoch, version=version, endpoints=tuple(endpoint(e) for e in engines))


async def test_source_yields_changes_only_and_outlives_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayActorError

    monkeypatch.setattr(source_module, "RETRY_S", 0.01)
    one, two = snapshot("e", 1, "a"), snapshot("e", 2, "a", "b")
    handle = FakeHandle([one, one, RayActorError(), two])
    assert await take(ControllerSource(handle).watch(), 2) == [one, two]  # type: ignore[arg-type]
    assert handle.asked[:2] == [("", -1), ("e", 1)]


async def test_source_keeps_the_engines_while_a_restarted_controller_learns_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "RETRY_S", 0.01)
    before = snapshot("old", 7, "a", "b")
    after = snapshot("new", 2, "a", "b")
    handle = FakeHandle([before, snapshot("new", 0), snapshot("new", 1, "a"), after])
    assert await take(ControllerSource(handle).watch(), 2) == [before, after]  # type: ignore[arg-type]


async def test_source_believes_a_restarted_controller_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "RETRY_S", 0.01)
    monkeypatch.setattr(source_module, "SETTLE_S", 0.05)
    before = snapshot("old", 7, "a", "b")
    left = snapshot("new", 1, "a")
    handle = FakeHandle([before, *[left] * 50])
    assert await take(ControllerSource(handle).watch(), 2) == [before, left]  # type: ignore[arg-type]
