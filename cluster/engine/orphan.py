"""No process of an engine outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def die_with_parent() -> None:
    """Kill this process as soon as its multiprocessing parent is gone; without one, do nothing.

    A thread waits on the pipe that multiprocessing keeps open to the parent. That holds whichever thread of
    the parent started us (a parent-death signal would fire when that *thread* ends) and costs nothing while
    waiting.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
