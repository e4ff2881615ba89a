"""Ranks that hold the shared experts and no others; routed experts are spread over the rest.

The ranks come first in the expert-parallel group, as the fused dispatch and combine want it, and each holds all
shared experts. Dispatch sends every token to one of them, and combine adds what comes back; where steps go by
all-gather, each takes an equal part of all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from .experts import LocalExperts
from .placement import shared_placement


class NoExperts(ExpertMapManager):
    """The map of a rank without routed experts, made from that of a rank with some."""

    def __init__(self, other: ExpertMapManager) -> None:
        self.__dict__.update(vars(other))
        self._local_num_experts = 0
        self._expert_map = torch.full((self.global_num_experts,), -1, dtype=torch.int32)


def shifted(manager: ExpertMapManager, ranks: int) -> ExpertMapManager:
    """The map of this rank where the first ``ranks`` have no routed experts."""
    parallel = manager.moe_parallel_config
    rank = parallel.ep_rank - ranks
    if rank < 0:
        return NoExperts(manager)
    moved = replace(parallel, ep_rank=rank, ep_size=parallel.ep_size - ranks)
    manager.update(moved, manager.global_num_experts)
    manager.moe_parallel_config = parallel
    return manager


class NPURoutedExperts(RoutedExperts):
    """vLLM's holder of the routed experts' weights, which some ranks have none of."""

    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: Any,
        expert_map_manager: ExpertMapManager,
        **kwargs: Any,
    ) -> None:
        """Arguments as vLLM's."""
        ranks = shared_placement(get_current_vllm_config()).ranks
        if ranks:
            expert_map_manager = shifted(expert_map_manager, ranks)
            moe_config.num_local_experts = expert_map_manager.local_num_experts
        super().__init__(
            layer_name,
            params_dtype,
            moe_config,
            quant_config,
            expert_map_manager=expert_map_manager,
            **kwargs,
        )


@dataclass(frozen=True, kw_only=True)
class SharedRank(LocalExperts):
    """The shared experts, where a rank has them in place of routed ones."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    """All shared experts' output for rows [t, hidden]."""
    rank: int
    ranks: int
    """Of those that have them."""

    def apply(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """This rank's share of the layer's output [T, hidden] for x [T, hidden]: its part of the tokens."""
        share = -(-x.shape[0] // self.ranks)
        mine = slice(self.rank * share, (self.rank + 1) * share)
        out = torch.zeros_like(x)
        if x[mine].shape[0]:
            out[mine] = self.compute(x[mine])
        return out


def shared_rank(layer: nn.Module, routed: RoutedExperts, ranks: int, factor: float) -> SharedRank:
    """This rank as one of the first ``ranks``, which have the shared experts ``layer``.

    Of dispatched rows, those behind the last one received are computed too, and never read.

    :param routed: the holder of the other ranks' experts; says whether rows travel as int8.
    :param factor: what the output is multiplied with.
    """
    moe, method = routed.moe_config, routed.quant_method

    def compute(rows: torch.Tensor) -> torch.Tensor:
        out = layer(rows)
        return out if factor == 1.0 else out * factor

    def from_int8(
        rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return compute((rows.float() * scales.unsqueeze(1)).to(dtype))

    return SharedRank(
        total=moe.num_experts,
        first=0,
        last=0,
        feed_forward=lambda rows, counts: compute(rows),
        int8_feed_forward=from_int8 if getattr(method, "takes_int8_rows", False) else None,
        compute=compute,
        rank=moe.moe_parallel_config.ep_rank,
        ranks=ranks,
    )
