"""Experts with 4-bit weights and activations in half precision (compressed-tensors W4A16, as Kimi K2 Thinking)."""

from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.utils import replace_parameter
from vllm.scalar_type import scalar_types

from npufleet.kernels.ops import quant_weight as ops

from ..moe.experts import AppliesLocalExperts
from .linear import await_scales, check_scales

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

BITS = 4
PACKED = 32 // BITS


class NPUW4A16ExpertsMethod(AppliesLocalExperts, CompressedTensorsWNA16MoEMethod):
    """vLLM's method as far as loading goes; the products are the NPU's grouped ones."""

    def __init__(self, weights: QuantizationArgs, moe: FusedMoEConfig) -> None:
        """What vLLM's method notes of the scheme, without its choice among kernels for other devices."""
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_quant, self.input_quant = weights, None
        self.symmetric, self.num_bits, self.strategy = weights.symmetric, BITS, weights.strategy
        self.packed_factor = Fraction(PACKED)
        self.group_size = -1 if weights.group_size is None else weights.group_size
        self.is_transposed = self.is_marlin = False

    def create_weights(self, layer: "RoutedExperts", *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """As vLLM's: packed int32 [experts, out, in / 8], scales [experts, out, groups]."""
        super().create_weights(layer, *args, **kwargs)
        await_scales(layer.w13_weight_scale, layer.w2_weight_scale)

    def get_fused_moe_quant_config(self, layer: "RoutedExperts") -> None:  # type: ignore[override]
        """None: vLLM's own kernels, which it describes, are not used."""

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:  # type: ignore[override]
        """Repack to [experts, in, out / 8] with values −8 … 7, scales and offsets to [experts, groups, out].

        :raises ValueError: the checkpoint gave no scales, or outputs that eight do not divide.
        """
        check_scales(layer.layer_name, layer.w13_weight_scale, layer.w2_weight_scale)
        for name in ("w13", "w2"):
            packed, scale = (
                getattr(layer, f"{name}_weight_packed").data,
                getattr(layer, f"{name}_weight_scale").data,
            )
            if packed.shape[1] % PACKED:
                raise ValueError(
                    f"{layer.layer_name}: {packed.shape[1]} outputs of an expert are not a multiple of 8"
                )
            experts = [self._values(one, 1).t().contiguous() for one in packed]
            weight = torch.stack([ops.pack_int4(one) for one in experts])
            scale = _by_group(scale)
            if self.symmetric:
                offset = no_offset(tuple(scale.shape), scale.dtype, scale.device)
            else:
                # (u − z) · s with u = q + 8 is (q + (8 − z)) · s.
                points = getattr(layer, f"{name}_weight_zero_point").data
                offset = _by_group(-torch.stack([self._values(one, 0) for one in points])).to(scale.dtype)
                delattr(layer, f"{name}_weight_zero_point")
            replace_parameter(layer, f"{name}_weight_packed", weight)
            replace_parameter(layer, f"{name}_weight_scale", scale)
            setattr(layer, f"{name}_weight_offset", offset)

    def _values(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """u − 8 of packed u from 0 to 15, int32."""
        kind = scalar_types.uint4b8 if self.symmetric else scalar_types.uint4
        return unpack_quantized_values_into_int32(packed, kind, packed_dim=dim) - 8

    def feed_forward(self, layer: "RoutedExperts", rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As :meth:`AppliesLocalExperts.feed_forward`."""
        gate_up, down = (
            tuple(getattr(layer, f"{name}_weight_{part}") for part in ("packed", "scale", "offset"))
            for name in ("w13", "w2")
        )
        return ops.int4_feed_forward(rows, gate_up, down, counts)


@cache
def no_offset(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for the operator, which wants offsets, of symmetric weights: the same ones for all layers."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _by_group(scale: torch.Tensor) -> torch.Tensor:
    """[experts, out, groups] → [experts, groups, out], or [experts, out] for one group."""
    return scale.squeeze(2).contiguous() if scale.shape[2] == 1 else scale.transpose(1, 2).contiguous()
