"""Checkpoints in the compressed-tensors format, as llm-compressor writes them."""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Int8,
)
from vllm.model_executor.parameter import PerTensorScaleParameter

from .experts import NPUW8A8ExpertsMethod
from .experts_int4 import NPUW4A16ExpertsMethod
from .linear import await_scales, check_static_layer

SUPPORTED = (
    "int8 weights by channel or tensor, with int8 activations that are dynamic by token or static by tensor "
    "(llm-compressor's scheme W8A8), and packed int4 weights by channel or group with unquantized activations (W4A16)"
)


class NPUW8A8Int8(CompressedTensorsW8A8Int8):
    """vLLM's scheme, keeping the input scale of each of the projections that it joins."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **kwargs: Any,
    ) -> None:
        """As vLLM's; static scales and zero points are one for each of ``output_partition_sizes``.

        :raises ValueError: static activations in fp16, for which the product takes no bias that is not an integer.
        """
        if self.is_static_input_scheme and params_dtype == torch.float16:
            raise ValueError(
                "static int8 activations are not supported on NPU in float16: use dtype bfloat16"
            )
        super().create_weights(
            layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs
        )
        for name in ("input_scale", "input_zero_point"):
            one = getattr(layer, name)
            if one is not None:
                data = torch.empty(len(output_partition_sizes), dtype=one.dtype)
                parameter = PerTensorScaleParameter(data=data, weight_loader=weight_loader)
                layer.register_parameter(name, parameter)
        await_scales(layer.weight_scale, layer.input_scale)


class NPUCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration with the schemes that NPUs compute; the others are refused when it is read."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the operators quantize and return."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NPUCompressedTensorsConfig":
        """The configuration of a checkpoint.

        :raises ValueError: a scheme or a feature that NPUs do not run, with those that they do.
        """
        made = super().from_config(config)
        assert isinstance(made, cls)
        for name, found in (
            ("kv_cache_scheme", made.kv_cache_scheme),
            ("transform_config", made.transform_config),
        ):
            if found:
                raise ValueError(
                    f"compressed-tensors checkpoints with a {name} are not supported on NPU yet; quantize the "
                    f"model without it. Supported are {SUPPORTED}"
                )
        for target, scheme in made.target_scheme_map.items():
            made.check_scheme(target, scheme)
        return made

    def check_scheme(self, target: str, scheme: dict[str, Any]) -> None:
        """:raises ValueError: unless the scheme of the layers ``target`` is one that NPUs compute."""
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        assert isinstance(weights, QuantizationArgs)
        plain = weights.type == "int" and scheme.get("output_activations") is None
        if plain and isinstance(inputs, QuantizationArgs) and inputs.type == "int":
            if self._is_static_tensor_w8a8(weights, inputs):
                return
            if self._is_dynamic_token_w8a8(weights, inputs) and inputs.symmetric:
                return
        packed = (scheme.get("format") or self.quant_format) == "pack-quantized" and weights.num_bits == 4
        whole = weights.strategy == "channel" or (weights.group_size or 0) % 32 == 0
        if plain and packed and whole and self._is_wNa16_group_channel(weights, inputs):
            return
        raise ValueError(
            f"compressed-tensors layers {target!r} have {_describe('weights', weights)} and "
            f"{_describe('activations', inputs)}, which is not supported on NPU yet; supported are {SUPPORTED}"
        )

    def _get_scheme_from_parts(
        self, weight_quant: QuantizationArgs, input_quant: QuantizationArgs | None, *args: Any, **kwargs: Any
    ) -> CompressedTensorsScheme:
        if input_quant is None:
            return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)
        return NPUW8A8Int8(
            strategy=weight_quant.strategy,
            is_static_input_scheme=not input_quant.dynamic,
            input_symmetric=input_quant.symmetric,
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's method for a linear layer; ours for experts."""
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        method = super().get_quant_method(layer, prefix)
        if getattr(getattr(layer, "scheme", None), "is_static_input_scheme", False):
            check_static_layer(prefix)
        return method

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        self._add_fused_moe_to_target_scheme_map()
        projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections]
        if any(scheme != schemes[0] for scheme in schemes):
            raise ValueError(
                f"{prefix}: the projections of experts have different schemes; quantize them alike"
            )
        if schemes[0] is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights, inputs = schemes[0]["weights"], schemes[0]["input_activations"]
        assert isinstance(weights, QuantizationArgs)
        if inputs is None:
            return NPUW4A16ExpertsMethod(weights, layer.moe_config)
        dynamic = isinstance(inputs, QuantizationArgs) and inputs.dynamic
        if not dynamic or weights.strategy != "channel":
            raise ValueError(
                f"{prefix}: experts with {_describe('weights', weights)} and {_describe('activations', inputs)} are "
                "not supported on NPU yet; supported are int8 weights by channel with dynamic activations by token "
                "and packed int4 weights with unquantized activations"
            )
        return NPUW8A8ExpertsMethod(layer.moe_config, with_offsets=False)


def _describe(what: str, args: QuantizationArgs | None) -> str:
    if args is None:
        return f"unquantized {what}"
    kind = "dynamic" if args.dynamic else "static"
    symmetry = "symmetric" if args.symmetric else "asymmetric"
    group = f" of {args.group_size}" if args.group_size and args.group_size > 0 else ""
    return f"{kind} {symmetry} {args.type}{args.num_bits} {what} by {args.strategy}{group}"
