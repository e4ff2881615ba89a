"""Runs a function as several ranks, one process each, and tells what became of every one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank a process is, of how many, and a folder that all of them see."""

    rank: int
    ranks: int
    folder: Path

    def share(self, name: str, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on every rank."""
        path = self.folder / name
        if self.rank == 0:
            draft = path.with_suffix(".draft")
            draft.write_bytes(make())
            draft.rename(path)
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()

    def die(self) -> None:
        """End at once, like a process that the kernel kills."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank returned, or the error it raised (``trace`` with it), or neither when it died."""

    value: Any = None
    error: str | None = None
    trace: str = ""
    finished: bool = False


def _rank(work: Callable[[Place], Any], place: Place, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        pipe.send(Outcome(value=work(place), finished=True))
    except (RuntimeError, AssertionError) as error:
        pipe.send(Outcome(error=str(error), trace=traceback.format_exc(), finished=True))
    pipe.recv()  # stay until all have finished: a rank that ends looks dead to the others
    os._exit(0)  # a failed communicator must not be tidied up together with others


def launch(
    work: Callable[[Place], Any], ranks: int, environment: dict[str, str] | None = None, seconds: float = 120
) -> list[Outcome]:
    """Run ``work`` in ``ranks`` new processes. Raises TimeoutError when one does not answer in time."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            place = Place(rank=rank, ranks=ranks, folder=Path(folder))
            arguments = (work, place, theirs, environment or {})
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            outcomes = [_outcome(pipe, deadline) for pipe in pipes]
            for pipe, outcome in zip(pipes, outcomes, strict=True):
                if outcome.finished:
                    pipe.send(None)
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return outcomes


def _outcome(pipe: Connection, deadline: float) -> Outcome:
    if not pipe.poll(max(0, deadline - time.monotonic())):
        raise TimeoutError("a rank did not answer in time")
    try:
        return pipe.recv()
    except EOFError:
        return Outcome()


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails with the traceback of the first that did not return."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.finished and outcome.error is None, f"rank {rank}: {outcome.trace or 'died'}"
    return [outcome.value for outcome in outcomes]


def errors(outcomes: list[Outcome]) -> list[str]:
    """What the ranks raised; fails for a rank that returned or died."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, f"rank {rank} raised nothing: {outcome}"
    return [outcome.error or "" for outcome in outcomes]
