"""Notice that the Ray under a fleet has died.

Ray ends a process that cannot reach its head service within a minute, without running any code of ours. So the
fleet looks at Ray's own processes itself, and takes everything down while it still can.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

from .engine import orphan

VITAL = ("gcs_server", "raylet")


@dataclass(frozen=True, kw_only=True)
class Lifeline:
    """The processes of Ray that a fleet cannot live without."""

    processes: tuple[tuple[str, psutil.Process], ...]  # name, process

    @classmethod
    def of_children(cls) -> Lifeline:
        """Return the lifeline of the Ray that this process started."""
        found = [(_name(child), child) for child in psutil.Process().children(recursive=True)]
        return cls(processes=tuple(entry for entry in found if entry[0] in VITAL))

    def lost(self) -> str | None:
        """Return the name of the first that has ended, None while all run."""
        return next((name for name, process in self.processes if _ended(process)), None)


def end_children(seconds: float) -> list[psutil.Process]:
    """Kill the children of this process, wait ``seconds`` for theirs to follow, kill what has not, and return
    that.

    Those below end by themselves when what started them is gone; their shared memory is removed in any case.
    """
    family = psutil.Process().children(recursive=True)
    shared = shared_by_children()
    for child in psutil.Process().children():
        child.kill()
    _, alive = psutil.wait_procs(family, timeout=seconds)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=seconds)
    orphan.remove(shared)
    return alive


def shared_by_children() -> set[str]:
    """Return the named shared memory that the processes below this one have mapped now."""
    shared: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has just ended
            shared.update(orphan.shared_memory(process.pid))
    return shared


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
