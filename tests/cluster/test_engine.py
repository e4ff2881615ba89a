"""One engine's life without Ray and without a model: start, failure at each step, death, drain."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from npufleet.cluster.config import HealingConfig, ModelConfig
from npufleet.cluster.engine import build, orphan, phases, pulse, replica, start_watch
from npufleet.cluster.engine.causes import MAX_CHARS, Cause, tell_failures
from npufleet.cluster.engine.phases import PhaseListener, StartPhase
from npufleet.cluster.engine.replica import Engine
from npufleet.cluster.placement.plan import Bundle, Plan
from npufleet.cluster.router.lookaside.tokens import TokenMint, check_token

FLEET = {
    "device": "virtual",
    "models": [{"name": "org/m 1", "source": "/m", "engine": {"tensor_parallel_size": 2}}],
}


class Controller:
    """A controller handle that answers `place` as scripted and remembers every call."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.leave: str | None = None  # what a heartbeat is answered

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any) -> Any:
            self.calls.append((name, args))
            if name == "heartbeat":
                return self.leave
            return self.answers.pop(0) if name == "place" else None

        return type("Method", (), {"remote": staticmethod(remote)})

    def said(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


class FakeLLM:
    """What the engine needs of AsyncLLM."""

    def __init__(self) -> None:
        self.errored = False
        self.stopped = False

        self.answers = True

    async def check_health(self) -> None:
        if self.errored:
            raise RuntimeError("dead")

    async def collective_rpc(self, method: str) -> None:
        assert method == "check_health"
        if not self.answers:
            await asyncio.Event().wait()

    def shutdown(self) -> None:
        self.stopped = True


class FakeServer:
    """What the engine needs of its gRPC server."""

    address = "127.0.0.1:5"
    last_token = 0.0

    def __init__(self) -> None:
        self.drained = False

    async def drain(self, deadline_s: float) -> int:
        self.drained = True
        return 0

    async def stop(self) -> None:
        pass


class World:
    """Everything around an engine, faked; and what happened to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[str] = []
        self.llm = FakeLLM()
        self.server = FakeServer()
        self.exits: list[int] = []
        self.exited = asyncio.Event()
        monkeypatch.setattr(replica.placement_group, "create", self._create)
        monkeypatch.setattr(replica.placement_group, "remove", self.groups.remove)
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        context = type("Context", (), {"get_node_id": staticmethod(lambda: "n0")})
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        monkeypatch.setattr("npufleet.cluster.engine.service.serve_engine", self._serve)
        monkeypatch.setattr(replica, "EngineInfo", lambda *labels: None)
        monkeypatch.setattr(replica.os, "_exit", self._exit)
        for name in ("WATCH_S", "LAST_WORDS_S"):
            monkeypatch.setattr(replica, name, 0.01)

    def _exit(self, code: int) -> None:
        self.exits.append(code)
        self.exited.set()

    async def _create(self, plan: Plan, seconds: float) -> str:
        self.groups.append(plan.engine_id)
        return plan.engine_id

    async def _serve(self, llm: Any, host: str, port: int, guard: Any = None, tls: Any = None) -> FakeServer:
        self.guard = guard
        return self.server

    async def factory(self, model: ModelConfig, plan: Plan, group: Any) -> FakeLLM:
        assert [bundle.node_id for bundle in plan.bundles] == ["n0", "n0"]
        return self.llm

    async def start(self, controller: Controller, factory: Any = None, **sections: Any) -> Engine:
        engine = Engine.__new__(Engine)
        await engine.__init__({**FLEET, **sections}, "org/m 1", controller, factory or self.factory)  # type: ignore[misc,arg-type]
        return engine


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


ROOM = {"nodes": ["n0", "n0"], "npus": [4, None], "device": "virtual npu X"}


async def test_a_start_registers_and_a_stop_gives_everything_back(world: World) -> None:
    controller = Controller({"refused": "full", "never": False}, ROOM)
    engine = await world.start(controller)
    endpoint = controller.said("heartbeat")[0][0]
    assert endpoint["state"] == "ready"
    assert (endpoint["device"], endpoint["address"], endpoint["model"]) == (
        "virtual npu X",
        "127.0.0.1:5",
        "org/m 1",
    )
    assert endpoint["metrics_url"].startswith("http://127.0.0.1:")
    assert " " not in engine.engine_id and "/" not in engine.engine_id
    details = [(args[2], args[3]) for args in controller.said("report")]
    assert details[:2] == [("placing", ""), ("placing", "full")]
    assert details[-1] == ("ready", "")
    assert set(controller.said("report")[-1][4]) == {"placing", "core"}
    await engine.check_health()
    await engine.__del__()
    assert controller.said("heartbeat")[-1][0]["state"] == "draining"
    assert controller.calls[-1] == ("unregister", (engine.engine_id,))
    assert (world.server.drained, world.llm.stopped, world.groups) == (True, True, [])


async def test_an_engine_of_a_fleet_with_a_secret_is_guarded(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of thirty-two bytes or more\n")
    engine = await world.start(Controller(ROOM), router={"secret": str(secret)})
    token = TokenMint(secret.read_bytes().strip()).route(engine.engine_id, "r", 30)
    assert check_token(token, world.guard._secret, world.guard._engine_id).route == "r"
    await engine.__del__()
    engine = await world.start(Controller(ROOM))
    assert world.guard is None
    await engine.__del__()


async def test_an_engine_makes_way_for_a_higher_priority(world: World) -> None:
    controller = Controller(ROOM)
    engine = await world.start(controller)
    controller.leave = "engine x of 'y' has a higher priority (3)"
    await asyncio.wait_for(world.exited.wait(), 10)
    assert world.exits == [0]
    assert controller.said("heartbeat")[-1][0]["state"] == "draining"
    assert (world.server.drained, world.llm.stopped, world.groups) == (True, True, [])
    assert controller.calls[-1] == ("unregister", (engine.engine_id,))
    with pytest.raises(RuntimeError, match="higher priority"):
        await engine.check_health()
    for task in engine._tasks:
        task.cancel()


async def test_an_engine_of_a_model_that_has_run_waits_for_lost_nodes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "PLACE_TIMEOUT_S", -1.0)  # long over
    waiting = {"refused": "no node of the Ray cluster offers the resource NPU", "never": False, "wait": True}
    engine = await world.start(Controller(waiting, ROOM))
    await engine.__del__()
    with pytest.raises(RuntimeError, match="no node"):
        await world.start(Controller({**waiting, "wait": False}, ROOM))


async def test_an_engine_ends_at_once_where_it_could_not_stay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica.os, "_exit", sys.exit)
    controller = Controller({"elsewhere": "the node is to be emptied"})
    with pytest.raises(SystemExit, match="0"):
        await world.start(controller)
    assert [args[2] for args in controller.said("place")] == ["n0"] and controller.said("unregister")


async def test_a_request_that_never_fits_fails_at_once(world: World) -> None:
    controller = Controller({"refused": "too large", "never": True})
    with pytest.raises(RuntimeError, match="too large"):
        await world.start(controller)
    assert controller.said("report")[-1][2:4] == ("refused", "too large")


async def test_a_failed_load_gives_the_npus_back_and_says_why(world: World) -> None:
    async def broken(model: ModelConfig, plan: Plan, group: Any) -> FakeLLM:
        assert world.groups
        raise ValueError("no such checkpoint")

    controller = Controller(ROOM)
    with pytest.raises(ValueError, match="no such checkpoint"):
        await world.start(controller, broken)
    assert world.groups == []
    assert controller.said("report")[-1][2:4] == ("refused", "ValueError: no such checkpoint")


async def test_the_cores_own_fault_is_what_is_told(world: World) -> None:
    async def broken(model: ModelConfig, plan: Plan, group: Any) -> FakeLLM:
        code = "from npufleet.cluster.engine import causes, phases; import os; os.getppid = lambda: %d\n"
        code += "phases.announce(phases.StartPhase.WEIGHTS)\n"
        code += "phases.announce_failure(causes.Cause.of(MemoryError('1 GiB short')))"
        command = [sys.executable, "-c", code % os.getpid()]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=120)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    controller = Controller(ROOM)
    with pytest.raises(RuntimeError, match="1 GiB short"):
        await world.start(controller, broken)
    assert controller.said("report")[-1][2:4] == ("failed", "MemoryError: 1 GiB short")


async def test_a_start_that_hangs_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(model: ModelConfig, plan: Plan, group: Any) -> FakeLLM:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setitem(start_watch.DEADLINES_S, "core", 0.1)
    with pytest.raises(RuntimeError, match="hangs in its start: the phase 'core' was not over after 0 s"):
        await world.start(Controller(ROOM), hangs)
    assert world.groups == []


async def test_a_dead_core_ends_the_process(world: World) -> None:
    controller = Controller(ROOM)
    engine = await world.start(controller)
    world.llm.errored = True
    await asyncio.wait_for(world.exited.wait(), 60)
    assert world.exits == [1]
    assert controller.said("died") == [(engine.engine_id, replica.DEAD)]
    with pytest.raises(RuntimeError, match="engine core or one of its workers died"):
        await engine.check_health()


async def test_a_core_that_makes_no_progress_ends_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    controller = Controller(ROOM)
    engine = await world.start(controller)
    engine._healing = HealingConfig(stall_s=0.1)
    world.llm.answers = False
    await asyncio.wait_for(world.exited.wait(), 60)
    ((_, why),) = controller.said("died")
    assert why.startswith("neither a token nor a finished step")


def test_phases_reach_the_parent_and_nobody_is_no_error() -> None:
    phases.announce(StartPhase.WEIGHTS)  # our parent does not listen
    listener = PhaseListener()
    code = "from npufleet.cluster.engine.phases import *; [announce(phase) for phase in StartPhase];"
    code += "announce_shared(['/dev/shm/a', '/dev/shm/b']); announce_npus(['n0:3', 'n1:0'])"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert [listener.poll() for _ in StartPhase] == list(StartPhase)
    assert listener.poll() is None
    assert listener.shared == ["/dev/shm/a", "/dev/shm/b"]
    assert listener.npus == ("n0:3", "n1:0")
    listener.close()


def test_a_cause_is_one_line_and_knows_whether_another_try_helps() -> None:
    from pydantic import BaseModel, field_validator
    from ray.exceptions import RayTaskError

    class Checked(BaseModel):
        size: int

        @field_validator("size")
        @classmethod
        def never(cls, value: int) -> int:
            raise ValueError("no such\n size")

    with pytest.raises(ValueError) as caught:
        Checked(size=1)
    assert Cause.of(caught.value) == Cause(text="size: no such size, got 1", final=True)
    remote = RayTaskError(
        "f", "ray::W.f() (pid=77, ip=10.0.0.7, actor_id=1)\n...", FileNotFoundError(2, "No such file", "/w")
    ).as_instanceof_cause()
    assert Cause.of(remote) == Cause(
        text="FileNotFoundError: [Errno 2] No such file: '/w'", final=False, pid=77, node="10.0.0.7"
    )
    assert Cause.of(OSError("config.json is not valid")).final
    assert not Cause.of(RuntimeError("x" * 9999)).final
    full = "NPU out of memory. Tried to allocate 1 GiB. If reserved memory is >> allocated memory try more"
    for error in (
        torch.OutOfMemoryError(full),
        RuntimeError(f"Worker failed with error '{full}', see above"),
    ):
        memory = Cause.of(error)
        assert memory.text.startswith("out of NPU memory: raise tensor_parallel_size, or lower")
        assert "Tried to allocate 1 GiB" in memory.text and "If reserved" not in memory.text
        assert not memory.final
    assert len(Cause.of(RuntimeError("x" * 9999)).text) < MAX_CHARS + 3


def test_what_the_core_logs_as_its_fault_is_told() -> None:
    told: list[Cause] = []
    core = logging.getLogger("vllm.v1.engine.core")
    before = list(core.handlers)
    tell_failures(told.append)
    try:
        core.error("no exception, no cause")
        try:
            raise ValueError("too few blocks")
        except ValueError:
            core.exception("EngineCore failed to start.")
    finally:
        core.handlers = before
    assert told == [Cause(text="ValueError: too few blocks", final=True)]


def test_named_shared_memory_is_seen_and_removed() -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{memory.name}"
    assert path in orphan.shared_memory()
    orphan.remove([path, path])
    assert path not in orphan.shared_memory()
    memory.buf[0] = 1  # what has it mapped keeps it
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    memory.close()


def _child(pipe: Any, marker: Path) -> None:
    orphan.die_with_parent(marker.touch)
    pipe.send(os.getpid())
    time.sleep(600)


def _parent(pipe: Any, marker: Path) -> None:
    multiprocessing.get_context("spawn").Process(target=_child, args=(pipe, marker)).start()
    time.sleep(600)


def test_the_core_dies_with_its_engine(tmp_path: Path) -> None:
    marker = tmp_path / "last-act"
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("spawn").Process(target=_parent, args=(theirs, marker))
    parent.start()
    assert ours.poll(120)
    core = psutil.Process(ours.recv())
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    core.wait(timeout=60)
    assert not core.is_running()
    assert marker.exists()


def test_the_environment_that_vllm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RAY_ADDRESS",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_RAY_BUNDLE_INDICES",
        "VLLM_DO_NOT_TRACK",
    ):
        monkeypatch.setenv(name, "")  # so that they are put back afterwards
    context = type("Context", (), {"gcs_address": "10.0.0.1:6379"})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    plan = Plan(engine_id="e", bundles=tuple(Bundle(rank=rank, node_id="n") for rank in range(3)))
    build.prepare_environment(plan)
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert os.environ["VLLM_RAY_BUNDLE_INDICES"] == "0,1,2"
