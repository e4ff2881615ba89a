"""Quantized layers against their formulas, and which formats are refused with what instead."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization import get_quantization_config

from npufleet.plugin import register_layers
from npufleet.plugin.quantization.fp8_block import check_blocks, dequantize
from npufleet.plugin.quantization.linear import check_static_layer
from npufleet.plugin.quantization.modelslim import ModelSlimConfig

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


def packed(**weights: Any) -> dict[str, Any]:
    return {**scheme({"num_bits": 4, **weights}, None), "format": "pack-quantized"}


@pytest.mark.parametrize(
    "given",
    [
        packed(),
        packed(strategy="group", group_size=128, symmetric=False),
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
        (packed(strategy="group", group_size=16), "int4 weights by group of 16 and unquantized activations"),
        (packed(num_bits=8), "int8 weights by channel and unquantized activations"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            r"weight_block_size None.*\[128, 128\]",
        ),
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


def test_scales_that_the_checkpoint_lacks_are_missed() -> None:
    layer = int8_layer(True)
    layer.weight_scale.data[3] = float("nan")
    with pytest.raises(ValueError, match="no scales for this layer"):
        run(
            layer,
            torch.randn(2, 64),
            None,
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
        )


DESCRIPTION = {
    "model_quant_type": "W8A8",
    "model.layers.0.self_attn.q_proj.weight": "W8A8_DYNAMIC",
    "model.layers.0.self_attn.k_proj.weight": "W8A8_DYNAMIC",
    "model.layers.0.self_attn.v_proj.weight": "W8A8",
    "model.norm.weight": "FLOAT",
}


def described(directory: Path, **changes: str) -> Path:
    (directory / "quant_model_description.json").write_text(json.dumps(DESCRIPTION | changes))
    return directory


def test_a_description_chooses_its_format(checkpoint: Checkpoint) -> None:
    config = configure(described(checkpoint("llama", rms_norm_eps=2e-6)))
    assert config.model_config.quantization == "ascend"
    quantization = config.quant_config
    assert isinstance(quantization, ModelSlimConfig)
    assert quantization.kind_of(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]) == (
        "W8A8_DYNAMIC"
    )
    with pytest.raises(ValueError, match="several kinds"):
        quantization.kind_of(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"])
    with pytest.raises(ValueError, match=r"says nothing of model\.layers\.7\.mlp\.down_proj"):
        quantization.kind_of(["model.layers.7.mlp.down_proj"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.mlp.down_proj.weight": "W4A8_DYNAMIC"}, r"W4A8_DYNAMIC.*supported are FLOAT, W8A8"),
        ({"fa_quant_type": "FAKQuant"}, "quantized cache"),
    ],
)
def test_refused_descriptions(checkpoint: Checkpoint, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(described(checkpoint("llama", rms_norm_eps=3e-6), **changes))


def test_static_activations_of_the_layer_that_latent_attention_takes_apart() -> None:
    check_static_layer("model.layers.0.self_attn.o_proj")
    with pytest.raises(ValueError, match=r"kv_b_proj: static.*dynamically"):
        check_static_layer("model.layers.0.self_attn.kv_b_proj")


def test_blocks_begin_where_parts_do() -> None:
    check_blocks("a", [1536, 576], 2112, 128)
    check_blocks("a", [576], 576, 128)
    for sizes, whole in (([96, 576], 672), ([64], 128)):
        with pytest.raises(ValueError, match=r"do not begin where blocks of 128 do.*tensor_parallel_size"):
            check_blocks("a", sizes, whole, 128)


def test_blocks_are_dequantized() -> None:
    weight, scale = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(2, 2)
    got = dequantize(weight, scale, (128, 128), torch.float32)
    for row, column in ((0, 0), (127, 128), (129, 127), (128, 199)):
        assert got[row, column] == weight[row, column].float() * scale[row // 128, column // 128]
