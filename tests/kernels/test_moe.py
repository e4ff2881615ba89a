"""Mixture-of-experts operators against formulas written out here, and what their references refuse."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from npufleet.kernels.ops import moe
from npufleet.kernels.reference import KERNELS
from npufleet.kernels.virtual import counters

TOKENS, HIDDEN, MIDDLE, EXPERTS, TOP_K = 11, 32, 24, 8, 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
):
    """The layer token by token in fp32, by the definition."""
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            gate, up = (x[token].float() @ gate_up[expert].float()).chunk(2)
            out[token] += weight * ((F.silu(gate) * up) @ down[expert].float())
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_shares_sum_up_to_the_layer(device, dtype, ranks):
    """Each rank expands, computes and combines its own experts' rows; rows of others stay unread (they are NaN)."""
    x, logits = rand(TOKENS, HIDDEN, dtype=dtype), rand(TOKENS, EXPERTS, seed=1)
    gate_up = rand(EXPERTS, HIDDEN, 2 * MIDDLE, seed=2, dtype=dtype) / HIDDEN**0.5
    down = rand(EXPERTS, MIDDLE, HIDDEN, seed=3, dtype=dtype) / MIDDLE**0.5
    weights, experts = moe.top_k_softmax(logits.to(device), TOP_K, renormalize=True)
    total, share = torch.zeros(TOKENS, HIDDEN), EXPERTS // ranks
    for first in range(0, EXPERTS, share):
        routed = moe.expand(x.to(device), experts, EXPERTS, first, first + share)
        local = slice(first, first + share)
        rows = moe.feed_forward(routed.rows, gate_up[local].to(device), down[local].to(device), routed.counts)
        total += moe.combine(rows, routed.places, weights, partial=ranks > 1).float().cpu()
    expected = layer(x, weights.cpu(), experts.cpu(), gate_up, down)
    assert torch.allclose(total, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_rank_whose_experts_nobody_chose_adds_zero(device):
    x, experts = rand(4, HIDDEN).to(device), torch.zeros(4, 1, dtype=torch.int32, device=device)
    routed = moe.expand(x, experts, EXPERTS, 4, 8)
    assert routed.counts.tolist() == [0] * 4 and routed.places.tolist() == [-1] * 4
    rows = moe.feed_forward(
        routed.rows, rand(4, HIDDEN, 8).to(device), rand(4, 4, HIDDEN).to(device), routed.counts
    )
    out = moe.combine(rows, routed.places, torch.ones(4, 1, device=device), partial=True)
    assert torch.equal(out.cpu(), torch.zeros(4, HIDDEN))


def test_the_host_never_waits_and_a_layer_is_few_operations(device):
    """Sizes of experts stay on the device; what is counted is what a captured step replays."""
    x, logits = rand(TOKENS, HIDDEN).to(device), rand(TOKENS, EXPERTS).to(device)
    gate_up, down = rand(4, HIDDEN, 8).to(device), rand(4, 4, HIDDEN).to(device)
    counters.reset()
    weights, experts = moe.top_k_softmax(logits, TOP_K, renormalize=False)
    routed = moe.expand(x, experts, EXPERTS, 2, 6)
    rows = moe.feed_forward(routed.rows, gate_up, down, routed.counts)
    moe.combine(rows, routed.places, weights, partial=True)
    counted = counters.read()
    assert not any(counted.syncs.values())
    assert sum(calls for name, calls in counted.ops.items() if name.startswith("npu::")) == 6


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_softmax(device, renormalize):
    logits = rand(TOKENS, EXPERTS, dtype=torch.bfloat16)
    weights, experts = moe.top_k_softmax(logits.to(device), TOP_K, renormalize=renormalize)
    expected, chosen = logits.float().softmax(-1).topk(TOP_K)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert experts.dtype == torch.int32 and torch.equal(experts.cpu().long(), chosen)
    assert weights.dtype == torch.float32 and torch.allclose(weights.cpu(), expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("biased", [True, False])
def test_top_k_grouped(device, score, renormalize, groups, top_groups, biased):
    """Against the definition: the groups' scores, then the best experts of the kept groups."""
    experts_total, k, scale = 24, 5, 2.5
    logits, bias = rand(TOKENS, experts_total), rand(experts_total, seed=4) if biased else None
    weights, experts = moe.top_k_grouped(
        logits.to(device),
        k,
        score=score,
        bias=None if bias is None else bias.to(device),
        groups=groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
    )
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    size = experts_total // groups
    for token in range(TOKENS):
        values = choice[token].view(groups, size).sort(descending=True).values
        worth = values[:, 0] if bias is None else values[:, :2].sum(-1)
        kept = set(worth.topk(top_groups).indices.tolist())
        allowed = [e for e in range(experts_total) if e // size in kept]
        best = sorted(allowed, key=lambda e: -float(choice[token, e]))[:k]
        assert experts[token].tolist() == best
        expected = scores[token, best]
        if renormalize:
            expected = expected / expected.sum()
        assert torch.allclose(weights[token].cpu(), expected * scale, atol=1e-6)


def test_with_a_bias_a_group_counts_by_its_two_best(device):
    """Group 0 has the best expert, group 1 the best two."""
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 1.9, -9.0]]).to(device)
    groups = {"score": "sigmoid", "groups": 2, "top_groups": 1}
    assert moe.top_k_grouped(logits, 1, **groups)[1].tolist() == [[0]]
    assert moe.top_k_grouped(logits, 1, bias=torch.zeros(6).to(device), **groups)[1].tolist() == [[3]]


def test_an_unknown_score_is_refused(device):
    with pytest.raises(ValueError, match=r"score is 'relu'.*softmax, sigmoid"):
        moe.top_k_grouped(rand(1, 8).to(device), 1, score="relu")


# What the references refuse, each wrong input on its own

ROUTING: dict[str, Any] = {
    "x": rand(4, 8),
    "expert_idx": torch.tensor([[0, 3], [1, 2], [3, 1], [1, 0]], dtype=torch.int32),
    "expert_num": 4,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
}
GROUPED: dict[str, Any] = {
    "x": [rand(6, 8)],
    "weight": [rand(3, 8, 5)],
    "group_list": torch.tensor([2, 0, 3]),
    "split_item": 2,
    "group_type": 0,
    "group_list_type": 1,
}
FINAL: dict[str, Any] = {
    "expanded_permuted_rows": rand(8, 6),
    "skip1": None,
    "skip2": None,
    "bias": None,
    "scales": rand(4, 2),
    "expanded_src_to_dst_row": torch.arange(8, dtype=torch.int32),
    "export_for_source_row": None,
    "drop_pad_mode": 2,
}
GATING: dict[str, Any] = {"x": rand(4, 16), "k": 2, "k_group": 2, "group_count": 4}
RIGHT = {
    "npu_moe_init_routing_v2": ROUTING,
    "npu_grouped_matmul": GROUPED,
    "npu_moe_finalize_routing": FINAL,
    "npu_moe_gating_top_k": GATING,
    "npu_moe_gating_top_k_softmax": {"x": rand(4, 16), "k": 2},
}


def call(op: str, **changes: Any) -> Any:
    return KERNELS[f"npu::{op}"](**{**RIGHT[op], **changes})


def test_the_right_calls_pass():
    rows, places, counts, _ = call("npu_moe_init_routing_v2")
    assert counts.tolist() == [2, 3, 1, 2] and places.tolist() == [0, 6, 2, 5, 7, 3, 4, 1]
    assert torch.equal(rows[places.long()], ROUTING["x"].repeat_interleave(2, 0))
    assert call("npu_moe_init_routing_v2", expert_tokens_num_type=0)[2].tolist() == [2, 5, 6, 8]
    assert call("npu_moe_init_routing_v2", row_idx_type=1)[1].tolist() == [0, 7, 2, 5, 6, 3, 1, 4]
    (out,) = call("npu_grouped_matmul")
    assert torch.allclose(out[:2], GROUPED["x"][0][:2] @ GROUPED["weight"][0][0])
    assert out[5:].isnan().all(), "rows of no group are undefined"
    (same,) = call("npu_grouped_matmul", group_list=torch.tensor([2, 2, 5]), group_list_type=0)
    assert torch.equal(same[:5], out[:5])
    by_row = call("npu_moe_finalize_routing")
    by_column = torch.arange(8, dtype=torch.int32).view(4, 2).t().flatten()
    assert torch.equal(
        by_row, call("npu_moe_finalize_routing", expanded_src_to_dst_row=by_column, drop_pad_mode=0)
    )
    skipped = call("npu_moe_finalize_routing", skip1=by_row)
    assert torch.allclose(skipped, 2 * by_row)
    assert call("npu_moe_gating_top_k")[1].shape == (4, 2)


def test_the_older_row_numbers():
    """k · rows + row, which the first version of the routing wants."""
    assert call("npu_moe_gating_top_k_softmax")[2].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


WRONG = {
    ("npu_moe_init_routing_v2", "long experts"): (
        {"expert_idx": ROUTING["expert_idx"].long()},
        "expert_idx is torch.int64",
    ),
    ("npu_moe_init_routing_v2", "an expert that does not exist"): ({"expert_num": 3}, "outside 0 … 2"),
    ("npu_moe_init_routing_v2", "a negative expert"): (
        {"expert_idx": ROUTING["expert_idx"] - 1},
        "outside 0 … 3",
    ),
    ("npu_moe_init_routing_v2", "fewer rows"): ({"x": rand(3, 8)}, "3 rows but experts for 4"),
    ("npu_moe_init_routing_v2", "an empty range"): (
        {"active_expert_range": [2, 2]},
        "active_expert_range is [2, 2]",
    ),
    ("npu_moe_init_routing_v2", "a range too far"): (
        {"active_expert_range": [2, 5]},
        "active_expert_range is [2, 5]",
    ),
    ("npu_moe_init_routing_v2", "no number of experts"): ({"expert_num": -1}, "expert_num is -1"),
    ("npu_grouped_matmul", "an int32 list"): (
        {"group_list": torch.tensor([2, 0, 3], dtype=torch.int32)},
        "group_list is torch.int32",
    ),
    ("npu_grouped_matmul", "a short list"): ({"group_list": torch.tensor([2, 3])}, "must be [3]"),
    ("npu_grouped_matmul", "no list"): ({"group_list": None}, "group_list is None"),
    ("npu_grouped_matmul", "too many rows"): (
        {"group_list": torch.tensor([2, 2, 3])},
        "asks for 7 rows, x has 6",
    ),
    ("npu_grouped_matmul", "a negative size"): ({"group_list": torch.tensor([2, -1, 3])}, "negative size"),
    ("npu_grouped_matmul", "falling sums"): (
        {"group_list": torch.tensor([2, 1, 3]), "group_list_type": 0},
        "group_list falls",
    ),
    ("npu_grouped_matmul", "another dtype of weight"): (
        {"weight": [rand(3, 8, 5).half()]},
        "weight is torch.float16",
    ),
    ("npu_grouped_matmul", "another width"): ({"weight": [rand(3, 7, 5)]}, "disagree on k"),
    ("npu_grouped_matmul", "strided weights"): (
        {"weight": [rand(3, 8, 10)[..., ::2]]},
        "neither contiguous nor",
    ),
    ("npu_grouped_matmul", "strided rows"): ({"x": [rand(6, 16)[:, ::2]]}, "x is not contiguous"),
    ("npu_moe_finalize_routing", "a skipped place"): (
        {"expanded_src_to_dst_row": torch.arange(8, dtype=torch.int32) - 1},
        "outside 0 … 7",
    ),
    ("npu_moe_finalize_routing", "rows without capacity"): ({"drop_pad_mode": 3}, "wants 3"),
    ("npu_moe_finalize_routing", "fewer experts than choices"): (
        {"drop_pad_mode": 3, "expanded_permuted_rows": rand(1, 8, 6)},
        "fewer than the 2 choices",
    ),
    ("npu_moe_finalize_routing", "float64 scales"): (
        {"scales": rand(4, 2).double()},
        "scales is torch.float64",
    ),
    ("npu_moe_finalize_routing", "scales of other tokens"): ({"scales": rand(3, 2)}, "must be [4, 2]"),
    ("npu_moe_finalize_routing", "skip2 alone"): ({"skip2": rand(4, 6)}, "skip2 is given without skip1"),
    ("npu_moe_finalize_routing", "an unknown mode"): ({"drop_pad_mode": 4}, "drop_pad_mode is 4"),
    ("npu_moe_gating_top_k", "too many choices"): ({"k": 9}, "k is 9, allowed are 1 to 8"),
    ("npu_moe_gating_top_k", "groups that do not divide"): ({"group_count": 3}, "must divide 16 experts"),
    ("npu_moe_gating_top_k", "tiny groups"): ({"group_count": 8}, "must hold more than 2"),
    ("npu_moe_gating_top_k", "more groups than there are"): ({"k_group": 5}, "k_group is 5"),
    ("npu_moe_gating_top_k", "a bias of another dtype"): ({"bias": rand(16).half()}, "bias is torch.float16"),
    ("npu_moe_gating_top_k", "renorm"): ({"renorm": 1}, "renorm is 1"),
    ("npu_moe_gating_top_k", "groups that overflow"): (
        {"x": rand(1, 528), "group_count": 176, "k_group": 2},
        "fill 5632 places",
    ),
    ("npu_moe_gating_top_k_softmax", "too many choices"): ({"k": 17}, "k is 17"),
    ("npu_moe_gating_top_k_softmax", "integers"): (
        {"x": torch.ones(4, 16, dtype=torch.int32)},
        "x is torch.int32",
    ),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}: {case[1]}")
def test_wrong_calls_are_refused(case):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(case[0], **changes)


UNKNOWN = [
    ("npu_moe_init_routing_v2", {"quant_mode": 1}),
    ("npu_moe_init_routing_v2", {"drop_pad_mode": 1}),
    ("npu_moe_init_routing_v2", {"scale": torch.ones(4)}),
    ("npu_moe_init_routing_v2", {"active_num": 3}),
    ("npu_moe_init_routing_v2", {"expert_tokens_num_type": 2}),
    ("npu_moe_gating_top_k", {"tid2eid": torch.zeros(9, 2, dtype=torch.int32)}),
    ("npu_moe_gating_top_k_softmax", {"finished": torch.zeros(4, dtype=torch.bool)}),
    ("npu_moe_finalize_routing", {"bias": rand(4, 6)}),
    ("npu_grouped_matmul", {"bias": [rand(3, 5)]}),
    ("npu_grouped_matmul", {"act_type": 5}),
    ("npu_grouped_matmul", {"split_item": 0}),
    ("npu_grouped_matmul", {"group_type": 2}),
]


@pytest.mark.parametrize(("op", "changes"), UNKNOWN, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_arguments_without_a_reference_are_refused_by_name(op, changes):
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        call(op, **changes)
