"""The way of communication that the size of each step calls for."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform

from npufleet.kernels.distribute_limits import MIB, Distribution
from npufleet.kernels.ops.moe_distribute import ExpertGroup

from ..placement import check_operators, shared_placement
from .all_gather import AllGather
from .all_to_all import AllToAll
from .base import Communication, Own
from .choice import Layout, Way, chip_of, choose
from .group import distribution, opened
from .mc2 import MC2
from .preference import preferred_way

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts


def layout_of(moe: FusedMoEConfig, config: VllmConfig, mc2_tokens: int = 0) -> Layout:
    """The layout of a layer, for :func:`choose`."""
    captured = config.compilation_config.max_cudagraph_capture_size or 0
    whole = moe.skip_final_all_reduce  # its output may not be whole, so it stays with all-gather
    tensor = config.parallel_config.tensor_parallel_size
    return Layout(
        chip=chip_of(current_platform.get_device_name()),
        ep_size=moe.moe_parallel_config.ep_size if moe.moe_parallel_config.use_ep and not whole else 1,
        top_k=moe.experts_per_token,
        capacity=max(captured, config.scheduler_config.max_num_seqs),
        sharing=tensor,
        gathers=tensor > 1 and not moe.is_sequence_parallel,
        mc2_tokens=mc2_tokens,
        shared_ranks=shared_placement(config).ranks,
        preferred=preferred_way(config),
    )


def mc2_layer(moe: FusedMoEConfig, shared_ranks: int = 0) -> Distribution | None:
    """How MC2 spreads a layer, or None on a chip without it."""
    return distribution(
        current_platform.get_device_name(),
        moe.moe_parallel_config.ep_size,
        moe.num_experts,
        moe.experts_per_token,
        moe.hidden_dim,
        shared_ranks,
    )


def mc2_tokens(layer: Distribution, buffer_bytes: int, most_rows: int) -> int:
    """Tokens of a rank that MC2 takes: as many as fit its buffer, and whose rows take no more memory than those of
    the largest step without it, which is what memory is measured with.
    """
    return min(layer.most_tokens(buffer_bytes), most_rows // layer.rows(1))


class BySize(Communication):
    """Chooses for each step, alike on every rank: from the tokens of the largest data-parallel rank."""

    def __init__(self, moe: FusedMoEConfig, config: VllmConfig) -> None:
        """:raises ValueError: the user asked for MC2 by name, or for ranks for shared experts alone, and its operators
        do not take this layer.
        """
        layout, group = layout_of(moe, config), opened()
        self._ways: dict[Way, Communication] = {Way.ALL_GATHER: AllGather(moe)}
        if layout.ep_size > 1 and not layout.shared_ranks:
            self._ways[Way.ALL_TO_ALL] = AllToAll(moe)
        layer = mc2_layer(moe, layout.shared_ranks)
        check_operators(layout.shared_ranks, current_platform.get_device_name(), layer)
        if layout.ep_size > 1 and group is not None and layer is not None and not layer.refusals():
            share = -(-config.scheduler_config.max_num_batched_tokens // layout.sharing)
            tokens = mc2_tokens(layer, group.buffer_bytes, share * layer.top_k)
            layout = replace(layout, mc2_tokens=tokens)
            self._ways[Way.MC2] = MC2(moe, ExpertGroup(name=group.name, rank=group.rank, layout=layer))
        if layout.preferred is Way.MC2 and layout.mc2_tokens == 0:
            raise ValueError(why_not_mc2(layout, layer))
        self._layout = layout

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
        own: Own | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """As :meth:`Communication.run`."""
        # The tokens of a replica before sequence parallelism divides them, so that all ranks count alike.
        tokens = x.shape[0] if step is None else int(step.num_tokens_across_dp_cpu.max())
        return self._ways[choose(self._layout, tokens)].run(x, weights, experts, local, step, own)


def why_not_mc2(layout: Layout, layer: Distribution | None) -> str:
    """What keeps a layer from MC2, for the user who asked for it."""
    if layer is None:
        reason = f"its operators are not documented for {layout.chip.value}"
    elif layout.ep_size == 1:
        reason = "experts are not spread over ranks: set enable_expert_parallel"
    elif layer.refusals():
        reason = f"its operators do not take {'; '.join(layer.refusals())}"
    else:
        needed = -(-layer.buffer_bytes(1) // MIB)
        reason = (
            f"not one token fits: it needs HCCL_BUFFSIZE of {needed} at least, and max_num_batched_tokens of "
            f"{-(-layer.rows(1) // layer.top_k) * layout.sharing}"
        )
    return f"moe_communication 'mc2' is not possible for this model: {reason}"
