"""One rank of a data-parallel engine: a Ray actor that holds vLLM's engine core beside the rank's first worker."""

from __future__ import annotations

import os
from typing import Any

from . import orphan

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"


class RankActor:
    """The engine core of one rank, and the Ray workers that it starts in the engine's placement group.

    vLLM's own actor builds its core while it is created, so that nobody can be asked anything before all ranks have
    met. Here the ranks are created first, then the first one opens the store where they meet, and then they start.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        """``environment``: what vLLM and HCCL read from the environment of this process and its workers, where the
        node does not say otherwise.
        """
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if not os.environ.get(
            VISIBLE_DEVICES
        ):  # this process uses no NPU, and vLLM would count an empty list
            os.environ.pop(VISIBLE_DEVICES, None)
        self._store: Any = None
        self._core: Any = None

    def open_store(self) -> tuple[str, int]:
        """Open the store where the ranks agree on ports; return this node's address and the store's port."""
        import ray
        from vllm.distributed.utils import create_tcp_store

        host = ray.util.get_node_ip_address()
        self._store = create_tcp_store(host, 0, is_master=True, world_size=-1, wait_for_workers=False)
        return host, self._store.port

    def start(self, config: Any, addresses: Any, rank: int, local_rank: int) -> None:
        """Start the workers, load the model, lay out the cache; returns when the rank can answer.

        Args:
            config: vLLM's configuration of the whole engine, with the placement group and the store in it.
            addresses: vLLM's ``EngineZmqAddresses`` of the front end.
            rank: this rank's number.
            local_rank: its number among the ranks of its node.
        """
        from vllm.v1.engine.core import DPMoEEngineCoreActor, EngineCoreActor

        from .executor import FleetExecutor

        kind = DPMoEEngineCoreActor if config.model_config.is_moe else EngineCoreActor
        try:
            self._core = kind(
                vllm_config=config,
                local_client=True,
                addresses=addresses,
                executor_class=FleetExecutor,
                log_stats=True,
                dp_rank=rank,
                local_dp_rank=local_rank,
            )
        finally:
            # Whoever needs this rank's shared memory has it open by now. Without names nothing of it can be left,
            # however the processes end: they are Ray's, and Ray ends them without a last word.
            orphan.remove(orphan.shared_memory())

    def run(self) -> None:
        """Serve until the engine ends; raises what ended it."""
        self._core.run()
