"""Every row goes to the rank of its expert alone, and its result comes back."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from npufleet.kernels.ops import moe as ops

from .divided import Divided

if TYPE_CHECKING:
    from ..experts import LocalExperts


def exchange(x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    """Send the first ``send[0]`` rows of ``x`` to rank 0 of the expert-parallel group, the next ``send[1]`` to rank 1 …

    :returns: the rows that each rank sent here, ``receive[i]`` from rank i, in their order.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x, receive, send, group=get_ep_group().device_group)
    return out


class AllToAll(Divided):
    """All-to-all before the experts and behind them, with sizes that the host reads from the device first.

    For steps that are not captured.
    """

    def __init__(self, config: FusedMoEConfig) -> None:
        super().__init__(config)
        self._ranks = config.moe_parallel_config.ep_size

    def _own(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        largest: int,
    ) -> torch.Tensor:
        """As :meth:`Divided._own`."""
        here = local.last - local.first
        routed = ops.expand(x, experts, local.total, 0, local.total)
        theirs = torch.empty_like(routed.counts)
        dist.all_to_all_single(theirs, routed.counts, group=get_ep_group().device_group)
        # Rows to and from each rank: one wait for the device.
        send, receive = torch.stack([routed.counts, theirs]).view(2, self._ranks, here).sum(-1).tolist()
        rows = exchange(routed.rows, send, receive)
        back = self._compute(rows, theirs.view(self._ranks, here), local) if rows.shape[0] else rows
        return ops.combine(exchange(back, receive, send), routed.places, weights, partial=False)

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor, local: "LocalExperts") -> torch.Tensor:
        """The experts over ``rows``, which lie by rank and then by expert as ``counts`` [ranks, experts] tells."""
        here = counts.shape[1]
        numbers = torch.arange(here, dtype=torch.int32, device=rows.device).repeat(counts.shape[0])
        expert = numbers.repeat_interleave(counts.flatten(), output_size=rows.shape[0])
        sorted_rows = ops.expand(rows, expert.unsqueeze(1), here, 0, here)
        return local.feed_forward(sorted_rows.rows, sorted_rows.counts).index_select(0, sorted_rows.places)
