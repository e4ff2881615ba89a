"""How far a start is, rank by rank; what hangs; what a failed one says; whether an engine makes progress."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npufleet.cluster import env
from npufleet.cluster.engine import phased, pulse, start_watch
from npufleet.cluster.engine.last_words import LINES, compose, tail
from npufleet.cluster.engine.phased import announce_worker, name_of
from npufleet.cluster.engine.phases import StartPhase
from npufleet.cluster.engine.start_watch import StartWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = StartWatch(size=2, host="127.0.0.1", clock=Clock())
    monkeypatch.setenv(env.PHASES, made.address)
    monkeypatch.setattr(phased, "own_node", lambda: "10.0.0.7")
    yield made
    made.close()


def heard(watch: StartWatch) -> str:
    for _ in range(200):  # loopback delivers at once, but not within the call
        if watch.poll() != "core":
            break
        time.sleep(0.005)
    return watch.step


def test_the_slowest_rank_says_how_far_the_engine_is(watch: StartWatch) -> None:
    announce_worker(StartPhase.GROUPS, 0)
    announce_worker(StartPhase.GROUPS, 1)
    assert heard(watch) == "groups"
    watch.clock.now = 5.0  # type: ignore[attr-defined]
    announce_worker(StartPhase.WEIGHTS, 0)
    time.sleep(0.02)
    assert watch.poll() == "groups"
    assert watch.describe() == "groups, waiting for rank 1"
    announce_worker(StartPhase.WEIGHTS, 1)
    time.sleep(0.02)
    assert watch.poll() == "weights"
    assert watch.seconds == {"core": 0.0, "groups": 5.0}
    assert watch.describe() == "weights"
    watch.clock.now = 7.0  # type: ignore[attr-defined]
    watch.finish()
    assert watch.seconds["weights"] == 2.0


def test_a_phase_that_hangs_names_ranks_and_nodes(watch: StartWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(start_watch.DEADLINES_S, "groups", 10.0)
    for rank in (0, 1):
        announce_worker(StartPhase.GROUPS, rank)
    heard(watch)
    announce_worker(StartPhase.WEIGHTS, 0)
    time.sleep(0.02)
    watch.poll()
    assert watch.overdue() == ""
    watch.clock.now = 11.0  # type: ignore[attr-defined]
    assert watch.overdue() == ("the phase 'groups' was not over after 10 s: it waits for rank 1 on 10.0.0.7")
    assert set(start_watch.DEADLINES_S) == set(start_watch.ORDER)


def test_strangers_are_not_heard(watch: StartWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port, _ = env.phases() or ("", 0, "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for text in (b"", b"[]", b"{", b'{"word": "x", "phase": "graphs", "rank": 0}', b"\xff"):
            stranger.sendto(text, (host, port))
    monkeypatch.setenv(env.PHASES, f"{host}:{port}/wrong")
    announce_worker(StartPhase.GRAPHS, 0)
    time.sleep(0.05)
    assert watch.poll() == "core" and watch.ranks == {}
    monkeypatch.setenv(env.PHASES, "")
    announce_worker(StartPhase.GRAPHS, 0)  # no engine listens: no error


class PlainWorker:
    """What the announcing class is put before."""

    rank = 1
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0, world_size=2))

    def init_device(self) -> None:
        self.opened = True

    def load_model(self, *, dummy: bool = False) -> str:
        return f"loaded, dummy {dummy}"


def test_a_worker_class_of_any_platform_announces(watch: StartWatch) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    made = resolve_obj_by_qualname(name_of(f"{__name__}.PlainWorker"))
    assert issubclass(made, PlainWorker)
    worker = made()
    worker.init_device()
    assert worker.opened and worker.load_model(dummy=True) == "loaded, dummy True"
    time.sleep(0.02)
    watch.poll()
    assert watch.ranks[1].phase == "weights" and watch.ranks[1].pid == os.getpid()
    replica = SimpleNamespace(data_parallel_rank=3, world_size=2)
    assert phased.rank_of(SimpleNamespace(rank=1, vllm_config=SimpleNamespace(parallel_config=replica))) == 7
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = phased.nothing


def test_one_message_has_rank_node_meaning_and_the_last_lines(tmp_path: Path) -> None:
    assert compose("ValueError: no", None, "", []) == "ValueError: no"
    log = ["connecting", "\x1b[31mEI0006 timeout\x1b[0m", *map(str, range(LINES - 1))]
    path = tmp_path / "worker-abc-01000000-77.err"
    path.write_text("".join(f"{line}\n" for line in log))
    (tmp_path / "worker-abc-01000000-78.err").write_text("another process")
    lines = tail(tmp_path, 77)
    assert lines == ["EI0006 timeout", "0", "1", "2", "3"]
    text = compose("RuntimeError: init failed", 3, "10.0.0.7", lines)
    assert text.startswith("rank 3 on 10.0.0.7: RuntimeError: init failed. EI0006: a rank did not answer")
    assert text.endswith("its log ends: EI0006 timeout | 0 | 1 | 2 | 3")


async def test_tokens_or_answers_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    asked = 0

    async def answer(method: str) -> None:
        nonlocal asked
        asked += 1
        await (asyncio.Event().wait() if asked > 3 else asyncio.sleep(0))

    llm = SimpleNamespace(collective_rpc=answer)
    watching = asyncio.create_task(pulse.watch(llm, time.monotonic, 0.4))
    await asyncio.sleep(0.2)
    assert asked == 0 and not watching.done(), "tokens come, so nobody asks"
    watching.cancel()
    with pytest.raises(pulse.Stalled):
        await asyncio.wait_for(pulse.watch(llm, lambda: 0.0, 0.4), 20)
    assert asked == 4


async def test_a_halt_of_the_engines_own_process_is_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    answered = 0

    async def answer(method: str) -> None:
        nonlocal answered
        await asyncio.sleep(0.01)
        answered += 1

    async def halt() -> None:
        time.sleep(1.0)  # noqa: ASYNC251 - as a debugger or an overloaded host does; longer than it may stall

    watching = asyncio.create_task(pulse.watch(SimpleNamespace(collective_rpc=answer), lambda: 0.0, 0.4))
    for _ in range(2):
        await halt()
        await asyncio.sleep(0.15)
    assert answered > 0 and not watching.done()
    watching.cancel()
