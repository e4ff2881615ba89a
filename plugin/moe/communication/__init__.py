"""How tokens and experts of different ranks meet."""

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from .all_gather import AllGather
from .base import Communication


def communication_for(config: FusedMoEConfig) -> Communication:
    """The way of communication of a layer."""
    return AllGather(config)


__all__ = ["Communication", "communication_for"]
