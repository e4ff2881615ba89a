"""Linear layers with 4-bit weights and activations in half precision, as a kernel that vLLM's schemes choose."""

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types

from npufleet.kernels.ops import quant_weight as ops

from .linear import frozen

SYMMETRIC, ASYMMETRIC = scalar_types.uint4b8, scalar_types.uint4
GROUP = 32  # the operator's groups are multiples of it
PACKED = 8  # 4-bit values in an int32


class NPUMixedPrecisionKernel(MPLinearKernel):
    """x · Wᵀ with weights of four bits, with a scale by output channel or by group of inputs."""

    @classmethod
    def get_min_capability(cls) -> int:
        """0: NPUs have no CUDA compute capability."""
        return 0

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the operator takes the layer, and if not, why."""
        inputs, outputs = c.partition_weight_shape
        if c.weight_type not in (SYMMETRIC, ASYMMETRIC):
            return False, f"weights of {c.weight_type} are not supported on NPU yet, only 4-bit ones"
        if c.act_type not in (torch.bfloat16, torch.float16):
            return False, f"activations of {c.act_type} are not supported, only bfloat16 and float16"
        if outputs % PACKED:
            return False, f"{outputs} outputs on a rank are not a multiple of {PACKED}"
        if c.group_size != -1 and (c.group_size % GROUP or inputs % c.group_size):
            return (
                False,
                f"groups of {c.group_size} are not a multiple of {GROUP} that divides {inputs} inputs",
            )
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack from [out, in / 8] to [in, out / 8], values from 0 … 15 to −8 … 7, scales to [groups, out]."""
        packed, scale, zero = self._get_weight_params(layer)
        values = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed_dim=1) - 8
        replace_parameter(layer, self.w_q_name, frozen(ops.pack_int4(values.t().contiguous())))
        replace_parameter(layer, self.w_s_name, frozen(scale.data.t().contiguous()))
        layer.offset = None
        if zero is not None:
            # (u − z) · s with u = q + 8 is (q + (8 − z)) · s.
            points = unpack_quantized_values_into_int32(zero.data, self.config.weight_type, packed_dim=0)
            layer.offset = frozen((8 - points).t().contiguous().to(scale.dtype))
            delattr(layer, self.w_zp_name or "")
        # One group is what the operator calls by channel.
        layer.group = self.config.group_size if scale.shape[1] > 1 else 0
        bias = getattr(layer, "bias", None)
        wide = bias is not None and bias.dtype == torch.bfloat16
        layer.wide_bias = frozen(bias.data.float()) if wide and bias is not None else bias

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] in bf16 or fp16 to [..., out]."""
        weight, scale, _ = self._get_weight_params(layer)
        out = ops.int4_matmul(
            x.reshape(-1, x.shape[-1]),
            weight,
            scale,
            offset=layer.offset,
            bias=None if bias is None else layer.wide_bias,
            group=layer.group,
        )
        return out.view(*x.shape[:-1], -1)
