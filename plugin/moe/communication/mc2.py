"""Every row goes to its expert's rank and back through fused operators (MC2), without a word to the host."""

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from npufleet.kernels.ops import moe_distribute as ops

from .divided import Divided

if TYPE_CHECKING:
    from ..experts import LocalExperts


class MC2(Divided):
    """One operator dispatches, one combines, and what lies between has static shapes: steps can be captured.

    Ranks may have different numbers of tokens. All of them take part, so nothing is masked; an idle replica's empty
    step counts like any other. Rows of experts with int8 weights are quantized before they are sent.
    """

    def __init__(self, config: FusedMoEConfig, group: ops.ExpertGroup) -> None:
        super().__init__(config)
        self._group = group

    def _own(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        largest: int,
    ) -> torch.Tensor:
        """As :meth:`Divided._own`."""
        int8 = local.int8_feed_forward
        sent = ops.dispatch(x, experts, weights, self._group, largest=largest, quantize=int8 is not None)
        if int8 is None:
            rows = local.feed_forward(sent.rows, sent.counts)
        else:
            rows = int8(sent.rows, sent.row_scales, sent.counts, x.dtype)
        return ops.combine(rows, experts, weights, sent, self._group, largest=largest)
