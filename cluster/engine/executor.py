"""vLLM's Ray executor, made to die with its engine and to say how far it is.

vLLM runs the engine core as a child process of the engine. When the engine is killed, that child would live
on under pid 1 and keep NPUs, memory and ports. The executor is the one part of that process that is ours,
so it watches the parent.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from .orphan import die_with_parent
from .phases import StartPhase, announce


class FleetExecutor(RayExecutorV2):
    """One engine's workers as Ray actors in the engine's own placement group."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        die_with_parent()
        announce(StartPhase.WORKERS)
        super().__init__(vllm_config)
        announce(StartPhase.CACHE)
