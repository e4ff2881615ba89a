"""vLLM's Ray executor, made to die with its engine and to say how far it is.

vLLM runs the engine core as a child process of the engine. When the engine is killed, that child would live
on under pid 1 and keep NPUs, memory and ports. The executor is the one part of that process that is ours,
so it watches the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from vllm.config import VllmConfig
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from .phases import StartPhase, announce


class FleetExecutor(RayExecutorV2):
    """One engine's workers as Ray actors in the engine's own placement group."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        die_with_parent()
        announce(StartPhase.WORKERS)
        super().__init__(vllm_config)
        announce(StartPhase.CACHE)


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
