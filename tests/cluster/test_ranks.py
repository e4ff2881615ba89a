"""The ranks of a data-parallel engine: what each is told, and whose failure is the engine's."""

from __future__ import annotations

import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from npufleet.cluster.engine import membership, ranks
from npufleet.cluster.engine import rank as rank_module
from npufleet.cluster.engine.causes import StartFailed
from npufleet.cluster.engine.coordinator import Coordinator


def test_ranks_are_numbered_on_their_nodes() -> None:
    assert ranks._numbers_on_node(["a", "a", "b", "a", "b"]) == [0, 1, 0, 2, 1]


def test_each_rank_has_names_and_npus_of_its_own() -> None:
    connector = SimpleNamespace(engine_id="kv")
    planned = {"npus": [4, 5, 0, 1], "more": 1}
    whole = SimpleNamespace(
        instance_id="x",
        kv_transfer_config=connector,
        additional_config=planned,
        parallel_config=SimpleNamespace(world_size=2),
    )
    made: list[Any] = [ranks._of_rank(whole, number) for number in (0, 1)]  # type: ignore[arg-type]
    assert [own.instance_id for own in made] == ["x_dp0", "x_dp1"]
    assert [own.kv_transfer_config.engine_id for own in made] == ["kv_dp0", "kv_dp1"]
    assert [own.additional_config["npus"] for own in made] == [[4, 5], [0, 1]]
    assert (whole.instance_id, connector.engine_id, planned["npus"]) == ("x", "kv", [4, 5, 0, 1])


def test_a_rank_takes_its_bundles_and_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    class Remote:
        def options(self, **options: Any) -> Remote:
            told.update(options)
            return self

        def remote(self, environment: dict[str, str]) -> str:
            told["environment"] = environment
            return "actor"

    monkeypatch.setattr(ray, "remote", lambda kind: Remote())
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    group: Any = object()
    assert ranks._actor(group, rank=2, width=4, runtime_env=None) == "actor"
    assert told["num_cpus"] == 0
    assert told["scheduling_strategy"].placement_group_bundle_index == 8
    assert told["environment"]["VLLM_RAY_BUNDLE_INDICES"] == "8,9,10,11"
    assert told["environment"]["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_HOST_IP" not in told["environment"], "each node has its own"


def test_a_core_joins_the_ray_node_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **told: joined.append(told))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    for _ in range(2):  # a rank that is a Ray actor is there already
        membership.join("environment")
    assert joined == [
        {"address": "10.0.0.1:6379", "_node_ip_address": "10.0.0.7", "runtime_env": "environment"}
    ]


def test_an_empty_list_of_npus_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_module.VISIBLE_DEVICES, "")
    rank_module.RankActor({"VLLM_X": "1"})
    assert rank_module.VISIBLE_DEVICES not in rank_module.os.environ
    monkeypatch.setenv(rank_module.VISIBLE_DEVICES, "3")
    rank_module.RankActor({})
    assert rank_module.os.environ[rank_module.VISIBLE_DEVICES] == "3"
    monkeypatch.delenv("VLLM_X")


@pytest.mark.parametrize("fails", [False, True])
def test_a_start_leaves_no_name_of_shared_memory(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    memory = SharedMemory(create=True, size=64)
    name = Path("/dev/shm") / memory.name.lstrip("/")

    def start(**arguments: Any) -> None:
        assert name.exists()
        if fails:
            raise ValueError("no such tensor")

    monkeypatch.setattr(core, "EngineCoreActor", start)
    config = SimpleNamespace(model_config=SimpleNamespace(is_moe=False))
    actor = rank_module.RankActor({})
    if fails:
        with pytest.raises(ValueError, match="no such tensor"):
            actor.start(config, None, 0, 0)
    else:
        actor.start(config, None, 0, 0)
    assert not name.exists()
    memory.close()
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]


class FakeRay:
    """Refs are names; each ends with what ``ends`` says, in that order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: Exception | None) -> None:
        self.ends = ends
        self.asked: list[str] = []
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _wait(self, refs: list[str], num_returns: int, timeout: float | None) -> Any:
        ended = [ref for ref in self.ends if ref in refs][:1]
        return ended, [ref for ref in refs if ref not in ended]

    def _get(self, refs: list[str]) -> None:
        self.asked += refs
        error = self.ends[refs[0]]
        if error is not None:
            raise error


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("start", "trace", cause)


def test_all_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, a=None, b=None)
    ranks._await(["a", "b"])
    assert fake.asked == ["a", "b"]


def test_the_rank_that_did_wrong_is_named_not_the_first_that_fell(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(
        monkeypatch, a=RayActorError(error_msg="its peer was gone"), b=failed(ValueError("no such tensor"))
    )
    with pytest.raises(StartFailed) as caught:
        ranks._await(["a", "b"])
    assert caught.value.cause.final
    assert caught.value.cause.text == "ValueError: no such tensor"


def test_a_rank_that_never_answers_does_not_hold_up_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, a=failed(RuntimeError("lost")))
    with pytest.raises(StartFailed, match="RuntimeError: lost"):
        ranks._await(["a", "b"])


class FakeCoordinator:
    def __init__(self) -> None:
        self.alive, self.ended = True, False
        self.proc = SimpleNamespace(is_alive=lambda: self.alive)

    def shutdown(self) -> None:
        self.ended = True


class Listener:
    def __init__(self) -> None:
        self.cleaned = False

    def cleanup(self) -> None:
        self.cleaned = True


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[ranks.Ranks, threading.Event]:
    """Ranks of one actor that runs, and an event for when the front end is told that it is dead."""
    told = threading.Event()
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda: "run"))
    made = ranks.Ranks(actors=[actor], coordinator=FakeCoordinator(), listeners=(Listener(), Listener()))
    monkeypatch.setattr(made, "_tell_dead", told.set)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "get", lambda refs: None)
    return made, told


def slow_wait(refs: list[str], num_returns: int, timeout: float | None) -> Any:
    time.sleep(0.01)
    return [], refs


@pytest.mark.parametrize("what", ["rank", "coordinator"])
def test_the_end_of_any_part_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    made, told = watched(monkeypatch)
    monkeypatch.setattr(ray, "wait", slow_wait)
    made.run()
    assert not told.wait(0.1)
    if what == "rank":
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    else:
        made.coordinator.alive = False
    assert told.wait(10)


def test_a_stop_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = watched(monkeypatch)
    monkeypatch.setattr(ray, "wait", slow_wait)
    made.run()
    made.stop()
    made.stop()
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    assert not told.wait(0.2)
    assert made.coordinator.ended and all(listener.cleaned for listener in made.listeners)


@pytest.mark.slow
def test_the_coordinator_listens_and_leaves_nothing() -> None:
    made = Coordinator(ranks=2, waves=True, host="127.0.0.1", together=True, logging_config=None)
    files = [Path(address.removeprefix("ipc://")) for address in (made.front, made.output, made.input)]
    assert made.proc.is_alive() and all(file.exists() for file in files)
    made.shutdown()
    assert not made.proc.is_alive() and not any(file.exists() for file in files)
