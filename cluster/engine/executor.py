"""vLLM's Ray executor, made to die with its engine and to say how far it is.

vLLM runs the engine core as a child process of the engine. When the engine is killed, that child would live
on under pid 1 and keep NPUs, memory and ports. The executor is the one part of that process that is ours,
so it watches the parent.
"""

from __future__ import annotations

import socket
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from . import orphan, sockets, title
from .causes import tell_failures
from .membership import join
from .phased import name_of
from .phases import StartPhase, announce, announce_failure, announce_npus, announce_shared


class FleetExecutor(RayExecutorV2):
    """One engine's workers as Ray actors in the engine's own placement group."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._shared: list[str] = []
        orphan.die_with_parent(self._last_act)
        tell_failures(announce_failure)
        announce(StartPhase.PROCESSES)
        title.show(envs.VLLM_PROCESS_NAME_PREFIX)
        join(vllm_config.parallel_config.ray_runtime_env)
        vllm_config.parallel_config.worker_cls = name_of(vllm_config.parallel_config.worker_cls)
        super().__init__(vllm_config)
        answers: list[tuple[str, list[str], str]] = self.collective_rpc(_about_worker)
        announce_npus(npu for _, _, npu in answers)
        here = {path for host, paths, _ in answers if host == socket.gethostname() for path in paths}
        self._shared = sorted(here.union(orphan.shared_memory()))
        announce_shared(self._shared)

    def _last_act(self) -> None:
        orphan.remove(self._shared)
        sockets.remove()


def _about_worker(worker: Any) -> tuple[str, list[str], str]:
    """Runs in each worker: its host, the shared memory it has mapped, and its NPU as NODE_ID:NUMBER."""
    import ray

    context = ray.get_runtime_context()
    numbers = context.get_accelerator_ids().get("NPU") or ["?"]
    return socket.gethostname(), orphan.shared_memory(), f"{context.get_node_id()}:{numbers[0]}"
