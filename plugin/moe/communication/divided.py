"""What the ways have in common that send rows to their experts: each token is sent by one rank alone."""

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from .base import Communication, Own, own_rows

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts


def pad_choices(experts: torch.Tensor, rows: int) -> torch.Tensor:
    """``experts`` int32 [T, k] with rows of the first k experts behind it: the choices of a token must differ."""
    missing = rows - experts.shape[0]
    if missing == 0:
        return experts
    first = torch.arange(experts.shape[1], dtype=experts.dtype, device=experts.device)
    return torch.cat([experts, first.expand(missing, -1)])


class Divided(Communication):
    """Tokens that tensor-parallel ranks share are divided among them first, and gathered at the end."""

    def __init__(self, config: FusedMoEConfig) -> None:
        # Ranks of one replica that hold the same tokens; sequence parallelism has divided them already.
        self._sharing = 1 if config.is_sequence_parallel else get_tp_group().world_size
        self._spread = config.sp_size

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
        own: Own | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """As :meth:`Communication.run`; the output is whole."""
        tokens = x.shape[0] if step is None else int(step.num_tokens_across_dp_cpu.max())
        largest = -(-tokens // (self._spread * self._sharing))
        if self._sharing == 1:
            return self._with(own, self._own(x, weights, experts, local, largest)), True
        group, tokens = get_tp_group(), x.shape[0]
        rank = group.rank_in_group
        # The last rank's padding goes to experts with weight 0: fewer rows than there are ranks.
        experts = pad_choices(experts, -(-tokens // self._sharing) * self._sharing)
        x, weights, experts = (own_rows(part, rank, self._sharing) for part in (x, weights, experts))
        out = self._with(own, self._own(x, weights, experts, local, largest))
        return group.all_gather(out, dim=0)[:tokens], True

    @staticmethod
    def _with(own: Own | None, out: torch.Tensor) -> torch.Tensor:
        return out if own is None else out.add_(own())

    @abstractmethod
    def _own(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        largest: int,
    ) -> torch.Tensor:
        """The layer for tokens that no other rank has.

        :param largest: tokens of the rank that has the most.
        """
