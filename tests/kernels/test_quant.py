"""Quantized products: against their formulas in exact arithmetic, and what the references refuse."""

import re
from typing import Any

import pytest
import torch

from npufleet.kernels.ops import moe, quant
from npufleet.kernels.reference import KERNELS

HALVES = (torch.bfloat16, torch.float16)


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def rounding(x: torch.Tensor, dtype: torch.dtype) -> float:
    """Half a step of ``dtype`` at the largest magnitude of ``x``."""
    return float(x.abs().max()) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", HALVES)
def test_dynamic_quantization(device, dtype):
    x = torch.randn(5, 96).to(dtype)
    x[2] = 0
    values, scale = (t.cpu() for t in quant.dynamic_quantize(x.to(device)))
    assert values.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(scale, x.float().abs().amax(-1) / 127)
    assert values[[0, 1, 3, 4]].abs().amax(-1).tolist() == [127] * 4
    assert not values[2].any()
    # Nearest: no integer is further than half a step from its value.
    assert ((values * scale[:, None] - x.float()).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("zero", [None, 0, -7, 20])
def test_static_quantization(device, zero):
    x = (torch.randn(5, 96) * 3).bfloat16()
    x[0, :2] = torch.tensor([1000.0, -1000.0])
    scale = torch.tensor([0.031])
    point = None if zero is None else torch.tensor([zero], dtype=torch.int32, device=device)
    values = quant.static_quantize(x.to(device), scale.to(device), point).cpu()
    expected = ((x.double() / 0.031).round() + (zero or 0)).clamp(-128, 127)
    assert values.dtype == torch.int8 and values[0, :2].tolist() == [127, -128]
    assert (values - expected).abs().max() <= 1  # 0.031 itself is rounded to fp32
    assert (values != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.int32])
def test_quantized_product(device, dtype, transposed, bias):
    x, weight = int8(5, 1100), int8(1100, 24)
    scale, token_scale = torch.rand(24) * 1e-3, torch.rand(5) * 1e-2
    added = None if bias is None else (torch.randn(24) * 1000).to(bias)
    stored = weight.t().contiguous().to(device).t() if transposed else weight.to(device)
    got = quant.quant_matmul(
        x.to(device),
        stored,
        scale.to(device),
        token_scale=token_scale.to(device),
        bias=None if added is None else added.to(device),
        dtype=dtype,
    ).cpu()
    sums = x.double() @ weight.double()
    if bias == torch.int32:
        sums = sums + added
    expected = sums * scale.double() * token_scale.double()[:, None]
    if bias == torch.float32:
        expected = expected + added
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= 1.01 * rounding(expected, dtype)


def test_a_static_product_has_no_token_scale(device):
    x, weight, scale, bias = int8(3, 64), int8(64, 8), torch.rand(8) * 1e-3, torch.randn(8)
    args = [t.to(device) for t in (x, weight, scale)]
    got = quant.quant_matmul(*args, bias=bias.to(device), dtype=torch.bfloat16).cpu()
    expected = x.double() @ weight.double() * scale.double() + bias
    assert (got.double() - expected).abs().max() <= 1.01 * rounding(expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_experts(device, dtype):
    """The quantized feed-forward is that of the dequantized weights over dequantized activations."""
    counts, hidden, middle = [3, 0, 4], 64, 32
    rows = torch.randn(9, hidden).to(dtype)  # two rows belong to no expert
    gate_up, down = int8(3, hidden, 2 * middle), int8(3, middle, hidden)
    kind = dtype if dtype == torch.bfloat16 else torch.float32
    up_scale, down_scale = (torch.rand(3, n).to(kind) * 1e-3 for n in (2 * middle, hidden))
    arguments = [t.to(device) for t in (rows, gate_up, up_scale, down, down_scale, torch.tensor(counts))]
    got = quant.quant_feed_forward(*arguments).cpu()

    def fake(x: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x.float() / scale).round() * scale

    start = 0
    for expert, count in enumerate(counts):
        x = fake(rows[start : start + count])
        both = (x @ (gate_up[expert].float() * up_scale[expert].float())).to(dtype)
        gate, up = both.float().chunk(2, -1)
        inner = fake((gate * gate.sigmoid() * up).to(dtype))
        expected = inner @ (down[expert].float() * down_scale[expert].float())
        error = (got[start : start + count].float() - expected).abs()
        assert not count or error.max() <= 0.02 * expected.abs().max()
        start += count


def test_experts_are_routed_as_others(device):
    """Rows that no expert of this rank takes stay undefined and are not added."""
    x, experts = torch.randn(4, 64).bfloat16().to(device), torch.tensor([[0, 2], [1, 3], [2, 3], [0, 1]])
    weights = torch.rand(4, 2, device=device)
    routed = moe.expand(x, experts.int().to(device), 4, 2, 4)
    scales = [torch.full((2, n), 1e-3, dtype=torch.bfloat16, device=device) for n in (64, 64)]
    out = quant.quant_feed_forward(
        routed.rows,
        int8(2, 64, 64).to(device),
        scales[0],
        int8(2, 32, 64).to(device),
        scales[1],
        routed.counts,
    )
    combined = moe.combine(out, routed.places, weights, partial=True).cpu()
    assert combined.isfinite().all() and not combined[3].any() and combined[2].any()


RIGHT: dict[str, dict[str, Any]] = {
    "npu_dynamic_quant": {"input": torch.randn(3, 16).bfloat16()},
    "npu_quantize": {
        "input": torch.randn(3, 16).bfloat16(),
        "scales": torch.ones(1),
        "zero_points": None,
        "dtype": torch.qint8,
        "axis": -1,
    },
    "npu_quant_matmul": {
        "x1": int8(3, 16),
        "x2": int8(16, 8),
        "scale": torch.ones(8),
        "pertoken_scale": torch.ones(3),
        "output_dtype": torch.bfloat16,
    },
    "npu_grouped_matmul": {
        "x": [int8(3, 16)],
        "weight": [int8(2, 16, 8)],
        "scale": [torch.ones(2, 8).bfloat16()],
        "per_token_scale": [torch.ones(3)],
        "group_list": torch.tensor([1, 2]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": torch.bfloat16,
    },
}
WRONG: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("npu_dynamic_quant", "fp32"): ({"input": torch.randn(3, 16)}, "input is torch.float32"),
    ("npu_dynamic_quant", "one dimension"): ({"input": torch.randn(3).bfloat16()}, "1 dimensions"),
    ("npu_dynamic_quant", "int4"): ({"dst_type": torch.quint4x2}, "only int8"),
    ("npu_dynamic_quant", "smoothing"): ({"smooth_scales": torch.ones(16)}, "smooth_scales"),
    ("npu_dynamic_quant", "by tensor"): ({"quant_mode": "pertensor"}, "quant_mode=pertensor"),
    ("npu_quantize", "multiplying"): ({"div_mode": False}, "div_mode=False"),
    ("npu_quantize", "unsigned"): ({"dtype": torch.quint8}, "only torch.qint8"),
    ("npu_quantize", "fp16 scales"): ({"scales": torch.ones(1).half()}, "scales is torch.float16"),
    ("npu_quantize", "another size"): ({"scales": torch.ones(8)}, "must be [1] or [16]"),
    ("npu_quantize", "points of another size"): (
        {"zero_points": torch.ones(16, dtype=torch.int32)},
        "must be as scales (1,)",
    ),
    ("npu_quant_matmul", "fp x1"): ({"x1": torch.randn(3, 16)}, "x1 is torch.float32"),
    ("npu_quant_matmul", "strided x1"): ({"x1": int8(3, 32)[:, ::2]}, "x1 is not contiguous"),
    ("npu_quant_matmul", "strided x2"): ({"x2": int8(16, 16)[:, ::2]}, "neither contiguous nor"),
    ("npu_quant_matmul", "another k"): ({"x2": int8(8, 8)}, "disagree on k"),
    ("npu_quant_matmul", "no rows"): (
        {"x1": int8(0, 16), "pertoken_scale": torch.ones(0)},
        "(0, 16) is empty",
    ),
    ("npu_quant_matmul", "scale as a column"): ({"scale": torch.ones(8, 1)}, "must be [1] or [8]"),
    ("npu_quant_matmul", "scale of inputs"): ({"scale": torch.ones(16)}, "must be [1] or [8]"),
    ("npu_quant_matmul", "bf16 token scale"): (
        {"pertoken_scale": torch.ones(3).bfloat16()},
        "pertoken_scale is torch.bfloat16",
    ),
    ("npu_quant_matmul", "token scale as a column"): ({"pertoken_scale": torch.ones(3, 1)}, "must be [3]"),
    ("npu_quant_matmul", "int8 result"): ({"output_dtype": None}, "output_dtype=None"),
    ("npu_quant_matmul", "fp16 from bf16 scales"): (
        {"output_dtype": torch.float16, "scale": torch.ones(8).bfloat16()},
        "scale is torch.bfloat16",
    ),
    ("npu_quant_matmul", "fp16 with a float bias and no token scale"): (
        {"output_dtype": torch.float16, "pertoken_scale": None, "bias": torch.ones(8)},
        "bias is torch.float32",
    ),
    ("npu_quant_matmul", "a bias as a row"): ({"bias": torch.ones(1, 8)}, "must be [8]"),
    ("npu_quant_matmul", "an offset"): ({"offset": torch.ones(8)}, "offset"),
    ("npu_quant_matmul", "groups"): ({"group_sizes": [1, 128, 128]}, "group_sizes"),
    ("npu_grouped_matmul", "no scale"): ({"scale": None}, "scale must be a list"),
    ("npu_grouped_matmul", "no token scale"): ({"per_token_scale": None}, "per_token_scale must be"),
    ("npu_grouped_matmul", "fp32 scale for bf16"): (
        {"scale": [torch.ones(2, 8)]},
        "scale is torch.float32",
    ),
    ("npu_grouped_matmul", "scale as columns"): (
        {"scale": [torch.ones(2, 8, 1).bfloat16()]},
        "must be [2, 8]",
    ),
    ("npu_grouped_matmul", "token scale of another length"): (
        {"per_token_scale": [torch.ones(4)]},
        "must be [3]",
    ),
    ("npu_grouped_matmul", "fp weight"): ({"weight": [torch.ones(2, 16, 8)]}, "weight is torch.float32"),
    ("npu_grouped_matmul", "an offset"): ({"offset": [torch.ones(8)]}, "offset"),
    ("npu_grouped_matmul", "int8 result"): ({"output_dtype": None}, "output_dtype=None"),
}


def call(name: str, **changes: Any) -> Any:
    arguments = {**RIGHT[name], **changes}
    leading = {"npu_dynamic_quant": 1, "npu_quantize": 3, "npu_quant_matmul": 3, "npu_grouped_matmul": 2}[
        name
    ]
    positional = [arguments.pop(key) for key in list(RIGHT[name])[:leading]]
    return KERNELS[f"npu::{name}"](*positional, **arguments)


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_calls_pass(name):
    call(name)


@pytest.mark.parametrize(("name", "what"), WRONG)
def test_wrong_calls_are_refused(name, what):
    changes, message = WRONG[name, what]
    with pytest.raises((ValueError, NotImplementedError), match=f"{name}: .*{re.escape(message)}"):
        call(name, **changes)
