"""vLLM's Ray executor, made to die with its engine and to say how far it is.

vLLM runs the engine core as a child process of the engine. When the engine is killed, that child would live
on under pid 1 and keep NPUs, memory and ports. The executor is the one part of that process that is ours,
so it watches the parent.
"""

from __future__ import annotations

import socket
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from . import orphan
from .causes import tell_failures
from .phases import StartPhase, announce, announce_failure, announce_shared


class FleetExecutor(RayExecutorV2):
    """One engine's workers as Ray actors in the engine's own placement group."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._shared: list[str] = []
        orphan.die_with_parent(lambda: orphan.remove(self._shared))
        tell_failures(announce_failure)
        announce(StartPhase.WORKERS)
        super().__init__(vllm_config)
        announce(StartPhase.CACHE)
        answers: list[tuple[str, list[str]]] = self.collective_rpc(_shared_by_worker)
        here = {path for host, paths in answers if host == socket.gethostname() for path in paths}
        self._shared = sorted(here.union(orphan.shared_memory()))
        announce_shared(self._shared)


def _shared_by_worker(worker: Any) -> tuple[str, list[str]]:
    """Runs in each worker: its host, and the shared memory it has mapped."""
    return socket.gethostname(), orphan.shared_memory()
