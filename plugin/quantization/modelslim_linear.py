"""Linear layers of ModelSlim's checkpoints: the tensors they store, and their products."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from .experts import check_offset
from .linear import apply_dynamic, apply_static, await_scales, check_scales, frozen, layout_weight, name_of


class _Int8Method(LinearMethodBase):
    """int8 weights [out, in] with ``weight_scale`` and ``weight_offset`` [out, 1]."""

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
        """The tensors that both kinds store."""
        loader, rows = extra_weight_attrs["weight_loader"], sum(output_partition_sizes)
        layer.input_size_per_partition = input_size_per_partition
        weight = torch.empty(rows, input_size_per_partition, dtype=torch.int8)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        for name in ("weight_scale", "weight_offset"):
            data = torch.empty(rows, 1, dtype=torch.float32)
            layer.register_parameter(
                name, ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            )
        await_scales(layer.weight_scale, layer.weight_offset)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lay out the weight for the product.

        :raises ValueError: weight offsets that are not zero.
        """
        check_scales(name_of(layer), layer.weight_scale, layer.weight_offset)
        check_offset(name_of(layer), layer.weight_offset)
        del layer.weight_offset
        layout_weight(layer, layer.weight, layer.weight_scale)


@register_weight_loader_v2_supported_method
class ModelSlimDynamicMethod(_Int8Method):
    """``W8A8_DYNAMIC``: activations are quantized for each token."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] in bf16 or fp16 to [..., out]."""
        return apply_dynamic(layer, x, bias)


@register_weight_loader_v2_supported_method
class ModelSlimStaticMethod(_Int8Method):
    """``W8A8``: one input scale and offset; ``deq_scale`` [out] is input scale · weight scale.

    ``quant_bias`` int32 [out] holds −offset · Σ W and the layer's bias divided by ``deq_scale``: the float bias that
    the checkpoint may still have is not added again. Where the input dimension is split, the sums of all ranks share
    it, so the first rank alone adds it.
    """

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
        """The tensors of both kinds, the input's scale and offset for each projection, and the constants."""
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        loader, rows = extra_weight_attrs["weight_loader"], sum(output_partition_sizes)
        for name in ("input_scale", "input_offset"):
            data = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=loader))
        # For fp16 models the tool writes the bits of the fp32 scale in the low half of an int64.
        deq_dtype = torch.int64 if params_dtype == torch.float16 else torch.float32
        for name, dtype in (("quant_bias", torch.int32), ("deq_scale", deq_dtype)):
            data = torch.empty(rows, dtype=dtype)
            layer.register_parameter(
                name, ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            )
        await_scales(layer.input_scale, layer.input_offset)
        layer.adds_constant = input_size == input_size_per_partition or layer.tp_rank == 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep one input scale, and the constants as the product takes them.

        :raises ValueError: joined projections with different input scales, whose biases do not fit together.
        """
        super().process_weights_after_loading(layer)
        scales, offsets = layer.input_scale.data, layer.input_offset.data
        if bool((scales != scales[0]).any()) or bool((offsets != offsets[0]).any()):
            raise ValueError(
                f"{getattr(layer, 'prefix', type(layer).__name__)}: projections that make one layer have different "
                f"input scales {scales.tolist()} or offsets {offsets.tolist()}; quantize them together"
            )
        deq = layer.deq_scale.data
        layer.output_scale = frozen(deq.int().view(torch.float32) if deq.dtype == torch.int64 else deq)
        del layer.deq_scale
        replace_parameter(layer, "input_scale", frozen(scales[:1].clone()))
        layer.input_point = frozen(offsets[:1].round().int())
        del layer.input_offset
        layer.constant = frozen(layer.quant_bias.data) if layer.adds_constant else None
        del layer.quant_bias

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] in bf16 or fp16 to [..., out]."""
        return apply_static(layer, x, None)
