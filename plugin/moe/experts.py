"""The experts that a rank holds, and vLLM's method for those without quantization."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from npufleet.kernels.ops import moe as ops

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

FeedForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [r, hidden] sorted by expert, rows per expert int64 [local experts]) → [r, hidden]."""
Int8FeedForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""(rows int8 [r, hidden], their scales fp32 [r], rows per expert, dtype of the result) → [r, hidden]."""


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """Experts ``first`` … ``last`` − 1 of the ``total`` of a layer, and what they compute.

    Where tensor parallelism splits each expert, every rank holds all of them and computes a part of each.
    """

    total: int
    first: int
    last: int
    feed_forward: FeedForward
    int8_feed_forward: Int8FeedForward | None = None
    """For rows that arrive quantized; None where weights are not int8."""

    def apply(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """These experts' share of the layer's output [T, hidden] for x [T, hidden].

        :param weights: [T, k]; choices of other ranks' experts add nothing.
        :param experts: int32 [T, k].
        """
        routed = ops.expand(x, experts, self.total, self.first, self.last)
        rows = self.feed_forward(routed.rows, routed.counts)
        partial = (self.first, self.last) != (0, self.total)
        return ops.combine(rows, routed.places, weights, partial=partial)


def check_layer(layer: "RoutedExperts") -> None:
    """Refuse, when a model is built, experts of a kind that the NPU's operators do not compute.

    :raises ValueError: with what is not supported.
    """
    moe = layer.moe_config
    refused = {
        f"the activation {moe.activation.value!r} (supported is 'silu', gated)": moe.activation
        != MoEActivation.SILU,
        "biases": moe.has_bias,
        "a clamped or scaled SwiGLU": any(
            x is not None for x in (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
        ),
        "router weights on the experts' input": layer.apply_router_weight_on_input,
        "padded hidden sizes": moe.hidden_dim != moe.hidden_dim_unpadded,
    }
    names = [name for name, found in refused.items() if found]
    if names:
        raise ValueError(
            f"{layer.layer_name}: experts with {' and '.join(names)} are not supported on NPU yet; supported are "
            "plain SwiGLU experts"
        )


def local_experts(layer: "RoutedExperts", before: int = 0) -> LocalExperts:
    """What this rank holds of ``layer``.

    :param before: the first ranks, which hold none (``own_ranks.py``); this is not one of them.
    """
    moe = layer.moe_config
    rank = moe.moe_parallel_config.ep_rank - before if moe.moe_parallel_config.use_ep else 0
    first = rank * moe.num_local_experts
    method: Any = layer.quant_method
    return LocalExperts(
        total=moe.num_experts,
        first=first,
        last=first + moe.num_local_experts,
        feed_forward=lambda rows, counts: method.feed_forward(layer, rows, counts),
        int8_feed_forward=partial(method.int8_feed_forward, layer) if method.takes_int8_rows else None,
    )


class AppliesLocalExperts:
    """What vLLM's methods of experts have in common here; the products are those of ``feed_forward``."""

    takes_int8_rows = False

    def int8_feed_forward(
        self,
        layer: "RoutedExperts",
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        counts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """As :meth:`feed_forward` for int8 ``rows`` with scales fp32 [r]; only where ``takes_int8_rows``."""
        raise NotImplementedError

    def feed_forward(self, layer: "RoutedExperts", rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The experts' SwiGLU for ``rows`` [r, hidden] sorted by expert, ``counts`` int64 [local experts]."""
        raise NotImplementedError

    def apply(
        self,
        layer: "RoutedExperts",
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """This rank's share of the output; the shared experts are the runner's."""
        return local_experts(layer).apply(x, topk_weights, topk_ids)


class NPUUnquantizedFusedMoEMethod(AppliesLocalExperts, UnquantizedFusedMoEMethod):
    """Experts in the model's own dtype, through grouped matrix products."""

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Lay the weights out as the grouped product reads them: [experts, in, out]."""
        super().process_weights_after_loading(layer)
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data = weight.data.transpose(1, 2).contiguous()

    def feed_forward(self, layer: "RoutedExperts", rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As :meth:`AppliesLocalExperts.feed_forward`."""
        return ops.feed_forward(rows, layer.w13_weight, layer.w2_weight, counts)
