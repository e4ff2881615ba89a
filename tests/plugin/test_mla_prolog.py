"""Which layers take one operator before absorbed attention, and how their weights are laid out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)

from npufleet.kernels.virtual import formats
from npufleet.plugin.layers.mla_prolog import PartsMethod, kind_of, take_apart, why_not
from npufleet.plugin.quantization.compressed_tensors import NPUW8A8Int8
from npufleet.plugin.quantization.modelslim_linear import ModelSlimDynamicMethod, ModelSlimStaticMethod

PLAIN = ("bfloat16", "bfloat16")
NZ = 29


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"kinds": ("int8", "int8"), "chip": "Ascend910B3", "hidden": 6144, "heads": 1}, ""),
        ({"chip": "Ascend310P3"}, "Ascend310P3 is neither of A2 nor of A3"),
        ({"context_ranks": 2}, "decode context parallel"),
        ({"kinds": ("bfloat16", "int8")}, "its projections are neither"),
        ({"kinds": ("int8", None)}, "its projections are neither"),
        ({"kinds": (None, None)}, "its projections are neither"),
        ({"hidden": 5120}, "hidden size 5120"),
        ({"query_rank": None}, "q_lora_rank None"),
        ({"heads": 6}, "6 heads"),
        ({"dtype": torch.float32}, "torch.float32"),
    ],
)
def test_where_it_fits(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "chip": "Ascend910_9392",
        "hidden": 7168,
        "query_rank": 1536,
        "heads": 8,
        "dtype": torch.bfloat16,
        "kinds": PLAIN,
        "context_ranks": 1,
    }
    found = why_not(**(right | changes))
    assert found.startswith(message) and bool(found) == bool(message)


def test_kinds_of_projections() -> None:
    def made(method: Any, bias: Any = None, **scheme: Any) -> str | None:
        return kind_of(SimpleNamespace(quant_method=method, bias=bias, **scheme))

    with set_current_vllm_config(VllmConfig()):
        plain = UnquantizedLinearMethod()
    joined = CompressedTensorsLinearMethod(None)
    assert made(plain) == "bfloat16" and made(plain, bias=torch.zeros(1)) is None
    assert made(ModelSlimDynamicMethod()) == "int8" and made(ModelSlimStaticMethod()) is None
    for static, kind in ((False, "int8"), (True, None)):
        scheme = NPUW8A8Int8(strategy="channel", is_static_input_scheme=static, input_symmetric=True)
        assert made(joined, scheme=scheme) == kind
    assert made(joined, scheme=SimpleNamespace()) is None and made(object()) is None


class Loaded:
    """The method of a layer that is laid out as it was loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do."""


def layer_of(**tensors: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.to("npu"), requires_grad=False))
    layer.quant_method = Loaded()
    return layer


def finished(layer: torch.nn.Module, kind: Any, widths: tuple[int, ...]) -> PartsMethod:
    method = take_apart(layer, kind, widths)
    assert layer.quant_method is method
    method.process_weights_after_loading(layer)
    for weight, _ in method.tensors(layer):
        assert weight.is_contiguous() and formats.find(weight.untyped_storage().data_ptr()) == NZ
    return method


def test_parts_of_bfloat16_multiply_as_the_whole_did() -> None:
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    expected = torch.nn.functional.linear(x.npu(), weight.npu())
    layer = layer_of(weight=weight)
    method = finished(layer, "bfloat16", (32, 16))
    first, second = method.products(layer, x.npu())
    assert torch.equal(first, expected[:, :32]) and torch.equal(second, expected[:, 32:])
    assert torch.equal(method.apply(layer, x.npu()), expected)
    assert [tuple(parameter.shape) for parameter in layer.parameters()] == [(32, 32), (32, 16)]
    whole = layer_of(weight=weight)
    assert torch.equal(finished(whole, "bfloat16", (48,)).apply(whole, x.npu()), expected)


def test_parts_of_int8_multiply_with_their_scales() -> None:
    values = torch.randint(-127, 128, (32, 48), dtype=torch.int8)
    scale, x = torch.rand(48) + 0.1, torch.randn(5, 32).bfloat16()
    layer = layer_of(weight=values, weight_scale=scale)
    method = finished(layer, "int8", (32, 16))
    wide = values.double() * scale.double()
    token_scale = x.double().abs().amax(1, keepdim=True) / 127
    expected = (x.double() / token_scale).round() * token_scale @ wide
    for found, wanted in zip(method.products(layer, x.npu()), expected.split((32, 16), dim=1), strict=True):
        torch.testing.assert_close(
            found.cpu().double(), wanted, atol=0.02 * float(wanted.abs().max()), rtol=0.01
        )
    assert [tuple(scale.shape) for _, scale in method.tensors(layer) if scale is not None] == [
        (1, 32),
        (1, 16),
    ]
