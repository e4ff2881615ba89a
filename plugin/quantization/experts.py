"""Experts with quantized weights, through the grouped products of the NPU."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from npufleet.kernels.ops import quant as ops

from ..moe.experts import AppliesLocalExperts
from .linear import await_scales, check_scales

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class NPUExpertsMethod(AppliesLocalExperts, FusedMoEMethodBase):
    """A method of experts with quantized weights."""

    def get_fused_moe_quant_config(self, layer: "RoutedExperts") -> None:
        """None: vLLM's own kernels, which it describes, are not used."""


def register(layer: torch.nn.Module, name: str, data: torch.Tensor, attributes: dict[str, Any]) -> None:
    """A parameter that vLLM's loader of experts fills."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


class NPUW8A8ExpertsMethod(NPUExpertsMethod):
    """int8 weights with a scale for each output channel; activations are quantized for each row."""

    takes_int8_rows = True

    def __init__(self, moe: FusedMoEConfig, *, with_offsets: bool) -> None:
        """:param with_offsets: the checkpoint names offsets beside the scales; they must be zero."""
        super().__init__(moe)
        self.offsets = with_offsets
        self.dtype = moe.in_dtype

    def create_weights(
        self,
        layer: "RoutedExperts",
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """int8 [experts, out, in] and scales fp32 [experts, out, 1]."""
        by_channel = {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, (rows, columns) in shapes.items():
            data = torch.empty(num_experts, rows, columns, dtype=torch.int8)
            register(layer, f"{name}_weight", data, extra_weight_attrs)
            register(layer, f"{name}_weight_scale", torch.empty(num_experts, rows, 1), by_channel)
            await_scales(getattr(layer, f"{name}_weight_scale"))
            if self.offsets:
                register(layer, f"{name}_weight_offset", torch.zeros(num_experts, rows, 1), by_channel)

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Lay out weights as [experts, in, out], and scales as [experts, out] in what the operator asks for.

        :raises ValueError: offsets that are not zero, or no scales.
        """
        check_scales(layer.layer_name, layer.w13_weight_scale, layer.w2_weight_scale)
        scale_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        for name in ("w13", "w2"):
            if self.offsets:
                check_offset(layer.layer_name, getattr(layer, f"{name}_weight_offset"))
                delattr(layer, f"{name}_weight_offset")
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            replace_parameter(layer, f"{name}_weight", weight.data.transpose(1, 2).contiguous())
            replace_parameter(layer, f"{name}_weight_scale", scale.data.squeeze(-1).to(scale_dtype))

    def feed_forward(self, layer: "RoutedExperts", rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As :meth:`AppliesLocalExperts.feed_forward`."""
        return ops.quant_feed_forward(
            rows, layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale, counts
        )

    def int8_feed_forward(
        self,
        layer: "RoutedExperts",
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        counts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """As :meth:`AppliesLocalExperts.int8_feed_forward`."""
        weights = (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
        return ops.int8_feed_forward(rows, row_scales, *weights, counts, dtype)


def check_offset(layer_name: str, offset: torch.Tensor) -> None:
    """:raises ValueError: weights with a zero point, which the operators do not take."""
    if bool(offset.any()):
        raise ValueError(
            f"{layer_name}: weights with offsets are not supported on NPU yet; quantize the weights symmetrically"
        )
