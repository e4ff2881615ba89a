"""Fused dispatch and combine of experts over several ranks (MC2): rows go to the ranks of their experts and their
results come back, each in one operator, without a size that the host would have to read.

Sources: torch_npu's documentation of ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``.
Tensor-parallel exchange inside the operators, experts that compute nothing (zero, copy, constant) and shrinking
groups are not used.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch_npu
from torch.distributed import ProcessGroup, get_rank

from ..distribute_limits import Distribution


class Dispatched(NamedTuple):
    """What a rank received, and what :func:`combine` needs to send it back."""

    rows: torch.Tensor
    """[A, hidden] sorted by local expert, A = ``Distribution.rows(largest)``; only as many as the counts sum up to are
    defined. int8 if they were quantized, else in the dtype of the tokens."""
    row_scales: torch.Tensor
    """fp32 [A]: what to multiply int8 rows with; undefined otherwise."""
    counts: torch.Tensor
    """int64 [local experts]: rows of each."""
    marks: torch.Tensor
    rank_counts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """The communicator of dispatch and combine, which nothing else may use, and the layer's layout over it."""

    name: str
    """As :func:`communicator_name` tells it."""
    rank: int
    layout: Distribution
    tp_group: str = ""
    """The name of a communicator of this rank alone, for CANN releases that ask for one on A3."""


def communicator_name(group: ProcessGroup) -> str:
    """HCCL's name of a process group's communicator on this rank, opening it where need be: all ranks call this."""
    backend = group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(get_rank(group))


def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    group: ExpertGroup,
    *,
    largest: int,
    quantize: bool = False,
    smooth: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> Dispatched:
    """Send every token to the ranks of its experts. All ranks of the group call this together.

    :param x: [tokens, hidden] in bf16 or fp16; at least one token.
    :param experts: int32 [tokens, k], the k of a token all different.
    :param weights: fp32 [tokens, k]; they travel with the rows where the layout says so.
    :param largest: tokens of the rank that has the most, the same number on every rank and in every layer of a step.
    :param quantize: send int8 rows, each by its own largest magnitude: scale = max|x| / 127.
    :param smooth: fp32 [experts, hidden], multiplied with a row before it is quantized, by its expert.
    :param active: bool [tokens] (trues first) or [tokens, k]: what takes part. Only where all ranks have equally many
        tokens; the others have no result.
    """
    layout = group.layout
    rows, scales, marks, counts, rank_counts, _, expanded = torch_npu.npu_moe_distribute_dispatch_v2(
        x,
        experts,
        group.name,
        layout.ranks,
        group.rank,
        layout.experts,
        scales=smooth,
        x_active_mask=active,
        expert_scales=weights if layout.weights_travel else None,
        group_tp=group.tp_group,
        tp_world_size=1 if group.tp_group else 0,
        tp_rank_id=0,
        expert_shard_type=0,
        shared_expert_num=layout.shared,
        shared_expert_rank_num=layout.shared_ranks,
        quant_mode=2 if quantize else 0,
        global_bs=largest * layout.ranks,
        expert_token_nums_type=1,
        comm_alg=layout.algorithm,
    )
    return Dispatched(rows, scales, counts, marks, rank_counts, expanded)


def combine(
    rows: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    dispatched: Dispatched,
    group: ExpertGroup,
    *,
    largest: int,
    active: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send the experts' rows back: Σ over a token's choices of weight · row, and shared experts' rows as they are.

    :param rows: [A, hidden] in bf16 or fp16, in the order of ``dispatched.rows``.
    :param experts: and ``weights``, ``largest``, ``active``: as they were dispatched.
    :returns: [tokens, hidden].
    """
    layout = group.layout
    return torch_npu.npu_moe_distribute_combine_v2(
        rows,
        experts,
        dispatched.marks,
        dispatched.rank_counts,
        weights,
        group.name,
        layout.ranks,
        group.rank,
        layout.experts,
        x_active_mask=active,
        expand_scales=dispatched.weights if layout.weights_travel else None,
        group_tp=group.tp_group,
        tp_world_size=1 if group.tp_group else 0,
        tp_rank_id=0,
        expert_shard_type=0,
        shared_expert_num=layout.shared,
        shared_expert_rank_num=layout.shared_ranks,
        global_bs=largest * layout.ranks,
        comm_quant_mode=0,
        comm_alg=""
        if layout.generation == "A3" and layout.algorithm.startswith("fullmesh")
        else layout.algorithm,
    )
