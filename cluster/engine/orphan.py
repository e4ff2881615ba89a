"""Nothing of an engine outlives it: no process, no shared memory.

Python's own cleaner of shared memory runs in a child of the process that made it, and Ray kills the
children of a worker together with the worker. So what an engine's processes share is written down while
they live and removed by whichever of them is left.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

_SHARED = re.compile(r"(/dev/shm/psm_\S+)$", re.MULTILINE)  # "psm_": how Python names shared memory


def die_with_parent(last_act: Callable[[], None] = lambda: None) -> None:
    """Kill this process as soon as its multiprocessing parent is gone; without one, do nothing.

    ``last_act`` runs before. A thread waits on the pipe that multiprocessing keeps open to the parent: that
    holds whichever thread of the parent started us (a parent-death signal would fire when that *thread*
    ends) and costs nothing while waiting.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        try:
            last_act()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def shared_memory(pid: int | None = None) -> list[str]:
    """Return the shared memory that a process (this one by default) has mapped and that still has a name.

    Raises ``OSError`` if the process is gone.
    """
    found = set(_SHARED.findall(Path(f"/proc/{pid or 'self'}/maps").read_text()))
    return sorted(path for path in found if os.path.exists(path))


def remove(paths: Iterable[str]) -> None:
    """Take away the names; processes that have the memory mapped keep it until they end."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
