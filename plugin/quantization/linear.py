"""Linear layers with int8 weights, as a kernel that vLLM's quantization schemes choose."""

import torch
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise

from npufleet.kernels.ops import quant as ops


class NPUInt8LinearKernel(Int8ScaledMMLinearKernel):
    """x · Wᵀ with int8 weights; activations are quantized for each token, or by the checkpoint's one scale."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Every Ascend chip that the plugin runs on multiplies int8."""
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """All but dynamic activations with a zero point."""
        if not c.is_static_input_scheme and not c.input_symmetric:
            return False, "takes dynamic activations without a zero point only"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lay out the weight as [in, out] and give every output channel its scale [out] in fp32."""
        weight, scale, input_scale, zero_point, _ = self._get_layer_params(layer)
        if not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        layout_weight(layer, weight, scale)
        if self.config.is_static_input_scheme:
            assert input_scale is not None
            join_input_scales(layer, input_scale, zero_point)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] in bf16 or fp16 to [..., out]."""
        if self.config.is_static_input_scheme:
            return apply_static(layer, x, bias)
        return apply_dynamic(layer, x, bias)


def await_scales(*scales: torch.Tensor | None) -> None:
    """Mark scales as not loaded: vLLM does not miss parameters that a quantized checkpoint lacks."""
    for scale in scales:
        if scale is not None:
            scale.data.fill_(float("nan"))


def check_scales(layer_name: str, *scales: torch.Tensor | None) -> None:
    """:raises ValueError: scales that :func:`await_scales` has marked and the checkpoint did not give."""
    if any(scale is not None and bool(scale.isnan().any()) for scale in scales):
        raise ValueError(
            f"{layer_name}: the checkpoint has no scales for this layer; name it among the layers that are not "
            "quantized, or quantize it"
        )


def layout_weight(layer: torch.nn.Module, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Replace ``weight`` int8 [out, in] by [in, out], ``weight_scale`` by fp32 [out].

    :raises ValueError: the checkpoint gave no scales.
    """
    check_scales(name_of(layer), scale, getattr(layer, "input_scale", None))
    replace_parameter(layer, "weight", frozen(weight.data.t().contiguous()))
    replace_parameter(layer, "weight_scale", frozen(scale.data.float().flatten().contiguous()))


def join_input_scales(
    layer: torch.nn.Module, input_scale: torch.Tensor, zero_point: torch.Tensor | None
) -> None:
    """One input scale for the joined projections of a layer, and everything constant folded into the others.

    Projections of one input are calibrated on the same values; where their scales differ, the range that holds
    all of them is taken. Then (q − z) · W · s_x · s_w = q · W · scale + constant with scale = s_x · s_w.
    """
    points = torch.zeros_like(input_scale) if zero_point is None else zero_point.data.float()
    largest = (input_scale * (127 - points)).max()
    smallest = (input_scale * (-128 - points)).min()
    joined = input_scale.max() if zero_point is None else (largest - smallest) / 255
    point = (-128 - smallest / joined).round() if zero_point is not None else torch.zeros_like(joined)
    scale = layer.weight_scale.data * joined
    replace_parameter(layer, "input_scale", frozen(joined.float().reshape(1)))
    layer.output_scale = frozen(scale)
    layer.input_point = None if zero_point is None else frozen(point.int().reshape(1))
    layer.constant = layer.constant_with_bias = None
    if zero_point is not None:
        constant = -point * layer.weight.data.sum(0, dtype=torch.int32).float() * scale
        layer.constant = frozen(constant)
        if getattr(layer, "bias", None) is not None:
            layer.constant_with_bias = frozen(constant + layer.bias.data.float())


def apply_dynamic(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] quantized for each token, times the layer's weight: [..., out]."""
    values, token_scale = ops.dynamic_quantize(x.reshape(-1, x.shape[-1]))
    out = ops.quant_matmul(
        values, layer.weight, layer.weight_scale, token_scale=token_scale, bias=bias, dtype=x.dtype
    )
    return out.view(*x.shape[:-1], -1)


def check_static_layer(name: str) -> None:
    """Refuse static activations where a layer's weight is needed by itself.

    :raises ValueError: the layer that latent attention takes apart. vLLM reads its weight by passing the identity
        through it, whose ones a scale made for activations does not hold.
    """
    if name.rpartition(".")[2] == "kv_b_proj":
        raise ValueError(
            f"{name}: static activations are not supported on NPU for this layer; leave it unquantized, or quantize "
            "its activations dynamically"
        )


def apply_static(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] quantized by the layer's input scale, times its weight: [..., out]."""
    if layer.constant is not None:
        bias = layer.constant if bias is None else layer.constant_with_bias
    values = ops.static_quantize(x.reshape(-1, x.shape[-1]), layer.input_scale, layer.input_point)
    out = ops.quant_matmul(values, layer.weight, layer.output_scale, bias=bias, dtype=x.dtype)
    return out.view(*x.shape[:-1], -1)


def name_of(layer: torch.nn.Module) -> str:
    """The layer's name in the model."""
    return getattr(layer, "prefix", type(layer).__name__)


def frozen(data: torch.Tensor) -> torch.nn.Parameter:
    """``data`` as a parameter that nobody trains."""
    return torch.nn.Parameter(data, requires_grad=False)
