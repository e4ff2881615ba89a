"""Quantized layers against their formulas, and which formats are refused with what instead."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization import get_quantization_config

from npufleet.plugin import register_layers

from .test_support import configure

Checkpoint = Callable[..., Path]
CHANNELS = [16, 8, 8]


@pytest.fixture(autouse=True)
def current_config() -> Iterator[None]:
    register_layers()
    with set_current_vllm_config(VllmConfig()):
        yield


def int8_layer(channelwise: bool, **parameters: torch.Tensor) -> torch.nn.Module:
    """What vLLM's scheme hands to the kernel: three projections of 64 inputs, joined."""
    layer = torch.nn.Module()
    layer.logical_widths = CHANNELS
    scales = torch.rand(32, 1) if channelwise else torch.rand(3)
    given = {
        "weight": torch.randint(-128, 128, (32, 64), dtype=torch.int8),
        "weight_scale": scales * 1e-2 + 1e-3,
        **parameters,
    }
    for name, value in given.items():
        layer.register_parameter(name, torch.nn.Parameter(value.to("npu"), requires_grad=False))
    return layer


def plain_weight(layer: torch.nn.Module, channelwise: bool) -> torch.Tensor:
    scale = layer.weight_scale.cpu().double().flatten()
    if not channelwise:
        scale = scale.repeat_interleave(torch.tensor(CHANNELS))
    return layer.weight.cpu().double() * scale[:, None]


def run(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None, **scheme: bool) -> torch.Tensor:
    kernel = init_int8_linear_kernel(module_name="test", **scheme)
    kernel.process_weights_after_loading(layer)
    return kernel.apply_weights(layer, x.to("npu"), bias).cpu()


def assert_rounded(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of the result to its dtype."""
    bound = torch.finfo(got.dtype).eps / 2 * expected.abs().max()
    assert (got.double() - expected).abs().max() <= 1.01 * bound


@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)])
def test_dynamic_activations(channelwise, dtype, shape):
    layer, x, bias = int8_layer(channelwise), torch.randn(shape).to(dtype), torch.randn(32).to(dtype)
    weight = plain_weight(layer, channelwise)
    got = run(
        layer,
        x,
        bias.to("npu"),
        is_channelwise=channelwise,
        is_static_input_scheme=False,
        input_symmetric=True,
    )
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    expected = (x.float() / scale).round().double() * scale.double() @ weight.t() + bias.double()
    assert got.dtype == dtype and got.shape == (*shape[:-1], 32)
    assert_rounded(got, expected)


@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("zero", [None, [-5, -5, -5]])
def test_static_activations(channelwise, with_bias, zero):
    bias = torch.randn(32).bfloat16()
    parameters: dict[str, torch.Tensor] = {"input_scale": torch.full((3,), 0.03125)}
    if zero is not None:
        parameters["input_zero_point"] = torch.tensor(zero, dtype=torch.int8)
    if with_bias:
        parameters["bias"] = bias
    layer, x = int8_layer(channelwise, **parameters), torch.randn(5, 64).bfloat16()
    weight, point = plain_weight(layer, channelwise), 0 if zero is None else zero[0]
    got = run(
        layer,
        x,
        layer.bias if with_bias else None,
        is_channelwise=channelwise,
        is_static_input_scheme=True,
        input_symmetric=zero is None,
    )
    values = ((x.double() / 0.03125).round() + point).clamp(-128, 127) - point
    expected = values * 0.03125 @ weight.t() + (bias.double() if with_bias else 0)
    assert_rounded(got, expected)


def test_joined_projections_take_the_range_that_holds_all():
    scales, points = torch.tensor([0.01, 0.02, 0.015]), torch.tensor([0, 28, -100], dtype=torch.int8)
    layer = int8_layer(True, input_scale=scales, input_zero_point=points)
    kernel = init_int8_linear_kernel(
        module_name="test", is_channelwise=True, is_static_input_scheme=True, input_symmetric=False
    )
    kernel.process_weights_after_loading(layer)
    top, bottom = 0.015 * 227, 0.02 * (-128 - 28)
    assert layer.input_scale.item() == pytest.approx((top - bottom) / 255)
    assert layer.input_point.item() == round(-128 - bottom / ((top - bottom) / 255))


def scheme(weights: dict[str, Any], activations: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", **weights},
        "input_activations": None if activations is None else {**common, "strategy": "token", **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


DYNAMIC = {"dynamic": True}


@pytest.mark.parametrize(
    "given",
    [
        scheme({}, DYNAMIC),
        scheme({"strategy": "tensor"}, DYNAMIC),
        scheme({}, {"strategy": "tensor"}),
        scheme({}, {"strategy": "tensor", "symmetric": False}),
    ],
)
def test_supported_schemes(checkpoint: Checkpoint, given: dict[str, Any]) -> None:
    config = configure(checkpoint("llama"), hf_overrides={"quantization_config": given})
    assert config.model_config.quantization == "compressed-tensors"
    assert type(config.quant_config) is get_quantization_config("compressed-tensors")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (scheme({"type": "float"}, {"type": "float", **DYNAMIC}), r"float8 weights.*int8 weights by channel"),
        (scheme({}, {"symmetric": False, **DYNAMIC}), "dynamic asymmetric int8 activations by token"),
        (scheme({"symmetric": False}, DYNAMIC), "static asymmetric int8 weights by channel"),
        (scheme({"num_bits": 4}, DYNAMIC), "int4 weights by channel and dynamic symmetric int8"),
        (
            scheme({}, DYNAMIC, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}),
            r"kv_cache_scheme.*quantize the model without it",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
            r"quantization 'auto_gptq'.*compressed-tensors",
        ),
    ],
)
def test_refused_formats(checkpoint: Checkpoint, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(checkpoint("llama"), hf_overrides={"quantization_config": given})


def test_quantized_models_are_half_precision(checkpoint: Checkpoint) -> None:
    given = {"quantization_config": scheme({}, DYNAMIC)}
    with pytest.raises(ValueError, match=r"float32 is not supported.*bfloat16"):
        configure(checkpoint("llama"), dtype="float32", hf_overrides=given)
