"""The way of communication that the size of each step calls for."""

from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform

from .all_gather import AllGather
from .all_to_all import AllToAll
from .base import Communication
from .choice import Layout, Way, chip_of, choose

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts


def layout_of(moe: FusedMoEConfig, config: VllmConfig) -> Layout:
    """The layout of a layer, for :func:`choose`."""
    captured = config.compilation_config.max_cudagraph_capture_size or 0
    whole = moe.skip_final_all_reduce  # its output may not be whole, so it stays with all-gather
    return Layout(
        chip=chip_of(current_platform.get_device_name()),
        ep_size=moe.moe_parallel_config.ep_size if moe.moe_parallel_config.use_ep and not whole else 1,
        top_k=moe.experts_per_token,
        capacity=max(captured, config.scheduler_config.max_num_seqs),
    )


class BySize(Communication):
    """Chooses for each step, alike on every rank: from the tokens of the largest data-parallel rank."""

    def __init__(self, moe: FusedMoEConfig, config: VllmConfig) -> None:
        self._layout = layout_of(moe, config)
        self._ways: dict[Way, Communication] = {Way.ALL_GATHER: AllGather(moe)}
        if self._layout.ep_size > 1:
            self._ways[Way.ALL_TO_ALL] = AllToAll(moe)

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
    ) -> tuple[torch.Tensor, bool]:
        """As :meth:`Communication.run`."""
        # The tokens of a replica before sequence parallelism divides them, so that all ranks count alike.
        tokens = x.shape[0] if step is None else int(step.num_tokens_across_dp_cpu.max())
        return self._ways[choose(self._layout, tokens)].run(x, weights, experts, local, step)
