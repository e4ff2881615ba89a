"""Products with 4-bit weights: against their formula, and what the references refuse."""

import re
from typing import Any

import pytest
import torch

from npufleet.kernels.ops import quant_weight as ops
from npufleet.kernels.reference import KERNELS

K, N = 128, 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(device, dtype, group, with_offset, with_bias):
    values = torch.randint(-8, 8, (K, N), dtype=torch.int32)
    groups = K // group if group else 1
    scale = (torch.rand(groups, N) * 0.1).to(dtype)
    offset = torch.randint(-7, 8, (groups, N)).to(dtype) if with_offset else None
    bias = torch.randn(N).to(torch.float32 if dtype == torch.bfloat16 else dtype) if with_bias else None
    x = torch.randn(5, K).to(dtype)
    packed = ops.pack_int4(values.to(device))
    assert packed.shape == (K, N // 8) and packed.dtype == torch.int32
    got = ops.int4_matmul(
        x.to(device),
        packed,
        scale.to(device),
        offset=None if offset is None else offset.to(device),
        bias=None if bias is None else bias.to(device),
        group=group,
    ).cpu()
    weight = values.double().view(groups, K // groups, N)
    if offset is not None:
        weight = weight + offset.double()[:, None]
    expected = x.double() @ (weight * scale.double()[:, None]).view(K, N)
    if bias is not None:
        expected = expected + bias.double()
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= 1.02 * torch.finfo(dtype).eps / 2 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("with_offset", [False, True])
def test_experts_products(device, dtype, groups, with_offset):
    """Each expert's rows by its own matrix; an expert without rows and rows without an expert are among them."""
    experts, counts = 3, torch.tensor([2, 0, 4])
    values = torch.randint(-8, 8, (experts, K, N), dtype=torch.int32)
    shape = (experts, groups, N) if groups > 1 else (experts, N)
    scale = (torch.rand(shape) * 0.1).to(dtype)
    offset = (torch.randint(-7, 8, shape) if with_offset else torch.zeros(shape)).to(dtype)
    rows = torch.randn(8, K).to(dtype)
    packed = ops.pack_int4_experts(values.to(device))
    assert packed.shape == (experts, K, N // 8)
    got = ops.grouped_int4_matmul(*(part.to(device) for part in (rows, packed, scale, offset, counts))).cpu()
    wide = [part.double().view(experts, groups, 1, N) for part in (scale, offset)]
    weight = ((values.double().view(experts, groups, -1, N) + wide[1]) * wide[0]).view(experts, K, N)
    expected = torch.cat([rows[:2].double() @ weight[0], rows[2:6].double() @ weight[2]])
    assert got.dtype == dtype and got[6:].isnan().all()
    assert (got[:6].double() - expected).abs().max() <= 1.02 * torch.finfo(
        dtype
    ).eps / 2 * expected.abs().max()


GROUPED = "npu_grouped_matmul"
PACK = "npu_convert_weight_to_int4pack"
PRODUCT = "npu_weight_quant_batchmatmul"
RIGHT: dict[str, dict[str, Any]] = {
    PACK: {"weight": torch.ones(4, 16, dtype=torch.int32)},
    PRODUCT: {
        "x": torch.randn(3, 64).bfloat16(),
        "weight": torch.ones(64, 2, dtype=torch.int32),
        "antiquant_scale": torch.ones(1, 16).bfloat16(),
    },
    GROUPED: {
        "x": [torch.randn(3, 64).bfloat16()],
        "weight": [torch.ones(2, 64, 2, dtype=torch.int32)],
        "antiquant_scale": [torch.ones(2, 16).bfloat16()],
        "antiquant_offset": [torch.zeros(2, 16).bfloat16()],
        "group_list": torch.tensor([1, 2]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
    },
}
WRONG: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    (PACK, "beyond four bits"): ({"weight": torch.full((4, 16), 8, dtype=torch.int32)}, "holds 8 to 8"),
    (PACK, "an odd width"): ({"weight": torch.ones(4, 12, dtype=torch.int32)}, "a multiple of 8"),
    (PACK, "int8"): ({"weight": torch.ones(4, 16, dtype=torch.int8)}, "weight is torch.int8"),
    (PACK, "a transposed view"): (
        {"weight": torch.ones(16, 16, dtype=torch.int32).t()[:, :8]},
        "not contiguous",
    ),
    (PRODUCT, "fp32"): ({"x": torch.randn(3, 64)}, "x is torch.float32"),
    (PRODUCT, "int8 weights"): ({"weight": torch.ones(64, 16, dtype=torch.int8)}, "weight of torch.int8"),
    (PRODUCT, "another k"): ({"x": torch.randn(3, 32).bfloat16()}, "disagree on k"),
    (PRODUCT, "fp32 scales"): ({"antiquant_scale": torch.ones(1, 16)}, "antiquant_scale is torch.float32"),
    (PRODUCT, "scales of inputs"): (
        {"antiquant_scale": torch.ones(64, 1).bfloat16()},
        "antiquant_scale (64, 1) must be [1, 16]",
    ),
    (PRODUCT, "small groups"): ({"antiquant_group_size": 16}, "antiquant_group_size is 16"),
    (PRODUCT, "one whole group"): ({"antiquant_group_size": 64}, "antiquant_group_size is 64"),
    (PRODUCT, "groups without scales"): ({"antiquant_group_size": 32}, "must be [2, 16]"),
    (PRODUCT, "a bf16 bias"): ({"bias": torch.ones(16).bfloat16()}, "bias is torch.bfloat16"),
    (PRODUCT, "a bias of another size"): ({"bias": torch.ones(8)}, "bias (8,) must be [16]"),
    (PRODUCT, "a quantized result"): ({"quant_scale": torch.ones(16)}, "quant_scale"),
    (GROUPED, "fp32"): ({"x": [torch.randn(3, 64)]}, "x is torch.float32"),
    (GROUPED, "no scales"): ({"antiquant_scale": None}, "antiquant_scale must be a list of one tensor"),
    (GROUPED, "no offsets"): ({"antiquant_offset": None}, "antiquant_offset must be a list of one tensor"),
    (GROUPED, "fp32 scales"): ({"antiquant_scale": [torch.ones(2, 16)]}, "antiquant_scale is torch.float32"),
    (GROUPED, "scales of other outputs"): (
        {"antiquant_scale": [torch.ones(2, 8).bfloat16()]},
        "antiquant_scale (2, 8) does not fit 2 experts of [64, 16]",
    ),
    (GROUPED, "groups that do not divide"): (
        {"antiquant_scale": [torch.ones(2, 3, 16).bfloat16()]},
        "antiquant_scale (2, 3, 16) does not fit",
    ),
    (GROUPED, "offsets of other groups"): (
        {"antiquant_offset": [torch.zeros(2, 2, 16).bfloat16()]},
        "antiquant_offset must have the shape",
    ),
    (GROUPED, "another k"): ({"x": [torch.randn(3, 32).bfloat16()]}, "disagree on k"),
    (PRODUCT, "less precision"): ({"inner_precise": 1}, "inner_precise is 1"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_calls_pass(name):
    KERNELS[f"npu::{name}"](**RIGHT[name])


@pytest.mark.parametrize(("name", "what"), WRONG)
def test_wrong_calls_are_refused(name, what):
    changes, message = WRONG[name, what]
    with pytest.raises((ValueError, NotImplementedError), match=f"{name}: .*{re.escape(message)}"):
        KERNELS[f"npu::{name}"](**{**RIGHT[name], **changes})
