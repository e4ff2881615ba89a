"""The AsyncLLM of a data-parallel engine: one to its users, with a core for each rank behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from ..placement.plan import Plan
from .ranks import Ranks, launch

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import VllmConfig


class DataParallelLLM(AsyncLLM):
    """vLLM's AsyncLLM over cores that the fleet started; it ends them when it is shut down."""

    ranks: Ranks | None = None

    def shutdown(self, timeout: float | None = None) -> None:
        """As vLLM's; then end the ranks."""
        super().shutdown(timeout)
        if self.ranks is not None:
            self.ranks.stop()


def start(config: VllmConfig, plan: Plan, group: PlacementGroup) -> AsyncLLM:
    """Start the ranks and return their AsyncLLM once all can answer.

    Raises:
        StartFailed: a rank did not start; it says why.
    """
    ranks = launch(config, plan, group, config.parallel_config.ray_runtime_env)
    made = False
    try:
        ranks.run()
        llm = DataParallelLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            client_addresses=ranks.client_addresses(),
        )
        assert isinstance(llm, DataParallelLLM)
        llm.ranks = ranks
        made = True
    finally:
        if not made:
            ranks.stop()
    return llm
