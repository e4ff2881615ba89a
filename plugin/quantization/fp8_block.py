"""Checkpoints in DeepSeek V3's published layout: FP8 weights with a scale for each block of 128 × 128.

Ascend A2 and A3 multiply no FP8, so the weights become the model's dtype when they are loaded: each element is
``weight`` · ``weight_scale_inv`` of its block (the name is upstream's; it is multiplied).
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import (
    FusedMoeWeightScaleSupported,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter

from npufleet.kernels.ops import moe as ops

from .experts import NPUExpertsMethod, register
from .linear import await_scales, check_scales, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8 = torch.float8_e4m3fn


class NPUFp8Config(Fp8Config):
    """vLLM's configuration of FP8 checkpoints, with weights by block only."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NPUFp8Config":
        """The configuration of a checkpoint.

        :raises ValueError: FP8 with another granularity.
        """
        made = super().from_config(config)
        assert isinstance(made, cls)
        if made.weight_block_size is None or made.store_dtype is not None:
            raise ValueError(
                f"FP8 checkpoints with weight_block_size {made.weight_block_size} and store_dtype "
                f"{made.store_dtype} are not supported on NPU yet; supported are those with a weight_block_size, as "
                "DeepSeek V3's [128, 128], or a bfloat16 checkpoint"
            )
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What loads a layer; None for layers that are never quantized."""
        assert self.weight_block_size is not None
        block = (self.weight_block_size[0], self.weight_block_size[1])
        experts = isinstance(layer, RoutedExperts)
        if not experts and not isinstance(layer, LinearBase):
            return None
        match = self.ignored_layers_match_mode
        if is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping, match_mode=match):
            return UnquantizedFusedMoEMethod(layer.moe_config) if experts else UnquantizedLinearMethod()
        return NPUFp8ExpertsMethod(layer.moe_config, block) if experts else NPUFp8LinearMethod(block)


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: "Sequence[int]", dtype: torch.dtype
) -> torch.Tensor:
    """weight [..., n, k] FP8 times the scale [..., ⌈n/block₀⌉, ⌈k/block₁⌉] of each element's block, in ``dtype``."""
    rows = scale.repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
    full = rows.repeat_interleave(block[1], -1)[..., : weight.shape[-1]]
    return (weight.float() * full).to(dtype)


def check_blocks(name: str, sizes: "Sequence[int]", whole: int, block: int) -> None:
    """Check that what a rank holds of a dimension begins where a block does.

    :param sizes: of the parts that the rank holds; ``whole`` of all ranks'.
    :raises ValueError: otherwise, with what to change.
    """
    starts = sizes if sum(sizes) != whole else sizes[:-1]
    if any(size % block for size in starts):
        raise ValueError(
            f"{name}: parts of {list(sizes)} elements do not begin where blocks of {block} do; choose a smaller "
            "tensor_parallel_size, or set enable_expert_parallel, which keeps experts whole"
        )


@register_weight_loader_v2_supported_method
class NPUFp8LinearMethod(UnquantizedLinearMethod):
    """A linear layer in the model's dtype whose checkpoint is FP8 by block."""

    supports_pre_processed_weights = False

    def __init__(self, block: tuple[int, int]) -> None:
        """:param block: rows and columns that share a scale."""
        super().__init__()
        self.block = block

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """``weight`` FP8 [out, in] and ``weight_scale_inv`` fp32 by block.

        :raises ValueError: projections or parts of ranks that share a block.
        """
        name = name_of(layer)
        check_blocks(name, output_partition_sizes, output_size, self.block[0])
        check_blocks(name, [input_size_per_partition], input_size, self.block[1])
        loader, rows = extra_weight_attrs["weight_loader"], sum(output_partition_sizes)
        layer.weight_block_size = list(self.block)  # vLLM's loader of joined projections asks
        layer.serving_dtype = params_dtype
        dims = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        weight = torch.empty(rows, input_size_per_partition, dtype=FP8)
        layer.register_parameter("weight", ModelWeightParameter(data=weight, **dims))
        shape = (
            sum(math.ceil(n / self.block[0]) for n in output_partition_sizes),
            math.ceil(input_size_per_partition / self.block[1]),
        )
        scale = BlockQuantScaleParameter(data=torch.empty(shape, dtype=torch.float32), **dims)
        layer.register_parameter("weight_scale_inv", scale)
        await_scales(scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The weight in the model's dtype.

        :raises ValueError: the checkpoint gave no scales.
        """
        check_scales(name_of(layer), layer.weight_scale_inv)
        weight = dequantize(layer.weight.data, layer.weight_scale_inv.data, self.block, layer.serving_dtype)
        replace_parameter(layer, "weight", torch.nn.Parameter(weight, requires_grad=False))
        del layer.weight_scale_inv
        layer.weight_block_size = None
        super().process_weights_after_loading(layer)


class NPUFp8ExpertsMethod(NPUExpertsMethod):
    """Experts in the model's dtype whose checkpoint is FP8 by block."""

    def __init__(self, moe: FusedMoEConfig, block: tuple[int, int]) -> None:
        """:param block: rows and columns that share a scale."""
        super().__init__(moe)
        self.block = block
        self.dtype = moe.in_dtype

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """FP8 [experts, out, in] and fp32 scales by block.

        :raises ValueError: parts of ranks that share a block.
        """
        middle, (high, wide) = intermediate_size_per_partition, self.block
        split = 1 if self.moe.moe_parallel_config.use_ep else self.moe.moe_parallel_config.tp_size
        for size in (high, wide):
            check_blocks(layer.layer_name, [middle], middle * split, size)
        by_block = {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
        up, across = math.ceil(middle / high), math.ceil(hidden_size / wide)
        down, along = math.ceil(hidden_size / high), math.ceil(middle / wide)
        weights = {"w13": (2 * middle, hidden_size), "w2": (hidden_size, middle)}
        scales = {"w13": (2 * up, across), "w2": (down, along)}
        for name in weights:
            data = torch.empty(num_experts, *weights[name], dtype=FP8)
            register(layer, f"{name}_weight", data, extra_weight_attrs)
            register(layer, f"{name}_weight_scale_inv", torch.empty(num_experts, *scales[name]), by_block)
            await_scales(getattr(layer, f"{name}_weight_scale_inv"))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """The weights in the model's dtype, laid out as [experts, in, out]; the gate and up halves on their own,
        since blocks do not reach across.

        :raises ValueError: the checkpoint gave no scales.
        """
        check_scales(layer.layer_name, layer.w13_weight_scale_inv, layer.w2_weight_scale_inv)
        gate, up = layer.w13_weight.data.chunk(2, 1)
        gate_scale, up_scale = layer.w13_weight_scale_inv.data.chunk(2, 1)
        halves = [dequantize(*pair, self.block, self.dtype) for pair in ((gate, gate_scale), (up, up_scale))]
        down = dequantize(layer.w2_weight.data, layer.w2_weight_scale_inv.data, self.block, self.dtype)
        for name, weight in (("w13", torch.cat(halves, 1)), ("w2", down)):
            frozen = torch.nn.Parameter(weight.transpose(1, 2).contiguous(), requires_grad=False)
            replace_parameter(layer, f"{name}_weight", frozen)
            delattr(layer, f"{name}_weight_scale_inv")

    def feed_forward(self, layer: RoutedExperts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As :meth:`NPUExpertsMethod.feed_forward`."""
        return ops.feed_forward(rows, layer.w13_weight, layer.w2_weight, counts)
