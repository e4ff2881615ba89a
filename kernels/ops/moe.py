"""Mixture of experts on one NPU: choosing experts, and the experts' feed-forward over rows sorted by expert.

Nothing here tells the host how many rows an expert has: the sizes stay on the device, so a step with these
operators can be captured in a graph.
"""

from typing import NamedTuple

import torch
import torch_npu

SCORES = ("softmax", "sigmoid")


class Routed(NamedTuple):
    """Rows sorted by expert."""

    rows: torch.Tensor
    """[tokens · k, hidden]; only as many rows as the counts sum up to are defined."""
    places: torch.Tensor
    """int32 [tokens · k]: the row of each (token, choice), −1 where the expert is not among the active ones."""
    counts: torch.Tensor
    """int64 [active experts]: rows of each."""


def top_k_softmax(logits: torch.Tensor, k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable experts of each token (Shazeer et al. 2017).

    :param logits: [tokens, experts].
    :param renormalize: divide the k probabilities by their sum.
    :returns: probabilities fp32 [tokens, k] and experts int32 [tokens, k], the most probable first.
    """
    weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits.float(), k=k)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def top_k_grouped(
    logits: torch.Tensor,
    k: int,
    *,
    score: str,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts among the best groups of experts (DeepSeek-V2, section 2.1.2; DeepSeek-V3, section 2.1.2).

    :param logits: [tokens, experts].
    :param score: ``softmax`` or ``sigmoid`` of the logits.
    :param bias: fp32 [experts], added to the scores for the choice alone; a group then counts by its two best.
    :param renormalize: divide the k scores by their sum.
    :param scale: multiplied with the scores, after renormalizing.
    :returns: scores fp32 [tokens, k] and experts int32 [tokens, k].
    :raises ValueError: another ``score``.
    """
    if score not in SCORES:
        raise ValueError(f"score is {score!r}, allowed are {', '.join(SCORES)}")
    sigmoid = score == "sigmoid"
    plain_sigmoid = sigmoid and not renormalize  # the operator always divides sigmoids by their sum
    weights, experts, scores = torch_npu.npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=top_groups,
        group_count=groups,
        group_select_mode=0 if bias is None else 1,
        renorm=0,
        norm_type=1 if sigmoid else 0,
        out_flag=plain_sigmoid,
        routed_scaling_factor=scale if sigmoid or not renormalize else 1.0,
        eps=1e-20,
    )
    if plain_sigmoid:
        weights = scores.gather(-1, experts.long()) * scale
    elif renormalize and not sigmoid:
        weights = weights / weights.sum(dim=-1, keepdim=True) * scale
    return weights, experts


def expand(x: torch.Tensor, experts: torch.Tensor, total: int, first: int, last: int) -> Routed:
    """Repeat each token for each of its experts first … last − 1 and sort the rows by expert.

    :param x: [tokens, hidden] in fp32, fp16 or bf16.
    :param experts: int32 [tokens, k], each within 0 … total − 1.
    :param total: experts of the layer, on all ranks.
    """
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        experts,
        active_num=-1,
        expert_num=total,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[first, last],
        row_idx_type=0,
    )
    return Routed(rows, places, counts)


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [r, k] times each expert's matrix: [r, n], undefined beyond the sum of ``counts``.

    :param weight: [experts, k, n], contiguous.
    :param counts: int64 [experts] on the device: how many rows, in order, are each expert's.
    """
    (out,) = torch_npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    return out


def feed_forward(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts: down(silu(gate · x) · (up · x)) for rows sorted by expert.

    :param rows: [r, hidden].
    :param gate_up: [experts, hidden, 2 · intermediate], the gate first.
    :param down: [experts, intermediate, hidden].
    :returns: [r, hidden], undefined beyond the sum of ``counts``.
    """
    return grouped_matmul(torch_npu.npu_swiglu(grouped_matmul(rows, gate_up, counts)), down, counts)


def combine(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, *, partial: bool
) -> torch.Tensor:
    """Σ over a token's choices of weight · row: [tokens, hidden], the inverse of :func:`expand`.

    :param rows: [tokens · k, hidden].
    :param weights: [tokens, k], cast to the dtype of rows.
    :param partial: some places are −1 and add nothing. Rows that no place names are not read.
    """
    if partial:
        rows = rows.view(weights.shape[1], weights.shape[0], rows.shape[1])
    return torch_npu.npu_moe_finalize_routing(
        rows, None, None, None, weights.to(rows.dtype), places, None, drop_pad_mode=3 if partial else 2
    )
