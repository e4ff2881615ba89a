"""References of the fused dispatch and combine of experts (MC2): rows really move between ranks.

A dispatch sends each token to the ranks of its experts, which get their rows by expert, then by sending rank, then by
token; a combine sends the experts' results back the same way and sums them up. What dispatch hands to combine
(``assist_info_for_combine``, ``ep_recv_counts``) has on a device an order of its own, so nobody else may read it.
"""

from typing import Any, NamedTuple

import torch

from .checks import require, wrong
from .communicator import Step
from .moe_distribute_checks import Call, active_choices, check_call, check_combine, check_dispatch
from .registry import reference

MARKS = 3
"""int32 that travel with each row: the sending rank, the token, the choice."""
AGREED = ("moe_expert_num", "global_bs", "quant_mode", "hidden size", "k", "element size")
"""What ranks compare before any row moves."""


class _Plan(NamedTuple):
    """Where a rank's tokens go: one entry for each row, by receiving rank, then by its expert, then by token."""

    token: torch.Tensor
    choice: torch.Tensor
    """k + s for the s-th shared expert."""
    expert: torch.Tensor
    """The row of ``scales``: shared experts first."""
    counts: list[torch.Tensor]
    """For each rank its experts' rows from here, int64."""

    def sizes(self) -> list[int]:
        """Rows for each rank."""
        return [int(count.sum()) for count in self.counts]


def _plan(call: Call, expert_ids: torch.Tensor, active: torch.Tensor) -> _Plan:
    layout = call.layout
    token, choice = active.nonzero(as_tuple=True)
    expert = expert_ids[token, choice].long()
    local = layout.local_experts
    rank, place = layout.shared_ranks + expert // local, expert % local
    if layout.shared_ranks:
        # Each shared expert lies on several ranks, which divide the sending ranks among them.
        copies = layout.shared_ranks // layout.shared
        expert = expert + layout.shared
        tokens = active.any(1).nonzero()[:, 0]
        for shared in range(layout.shared):
            where = shared * copies + call.group.rank % copies
            token, rank = torch.cat([token, tokens]), torch.cat([rank, torch.full_like(tokens, where)])
            choice = torch.cat([choice, torch.full_like(tokens, layout.top_k + shared)])
            expert = torch.cat([expert, torch.full_like(tokens, shared)])
            place = torch.cat([place, torch.zeros_like(tokens)])
    slot = rank * max(local, 1) + place
    order = slot.argsort(stable=True)
    found = torch.bincount(slot, minlength=layout.ranks * local).view(layout.ranks, local)
    counts = [found[r, : call.experts_of(r)] for r in range(layout.ranks)]
    return _Plan(token[order], choice[order], expert[order], counts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _exchange_counts(call: Call, plan: _Plan, quant_mode: int, itemsize: int, masked: bool) -> torch.Tensor:
    """Rows that each rank sends to each expert here, int64 [ranks, local experts].

    :raises ValueError: ranks that were called with other arguments.
    """
    layout, op = call.layout, call.op
    mine = [layout.experts, call.global_bs, quant_mode, layout.hidden, layout.top_k, itemsize]
    head = torch.tensor([*mine, call.tokens, int(masked)])
    pieces = [_bytes(torch.cat([head, count])) for count in plan.counts]
    size = 8 * (len(head) + call.local_experts)
    received = call.group.exchange(Step.COUNTS, pieces, [size] * layout.ranks)
    table = torch.stack([piece.view(torch.int64) for piece in received])
    for rank, theirs in enumerate(table[:, : len(mine)].tolist()):
        for name, ours, other in zip(AGREED, mine, theirs, strict=True):
            require(
                ours == other, op, f"{name} is {ours} on rank {call.group.rank} and {other} on rank {rank}"
            )
    tokens, any_masked = table[:, len(mine)], bool(table[:, len(mine) + 1].any())
    if int(tokens.min()) != int(tokens.max()):
        require(call.global_bs != 0, op, f"global_bs is 0, but ranks have {tokens.tolist()} tokens")
        require(not any_masked, op, "x_active_mask is given, but ranks have different numbers of tokens")
    return table[:, len(head) :]


def _quantize(rows: torch.Tensor, smooth: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and what to multiply them with; a row of zeros stays zeros."""
    values = rows.float() if smooth is None else rows.float() * smooth
    largest = values.abs().amax(-1)
    factor = torch.where(largest == 0, 0.0, 127.0 / largest)
    scaled = (values * factor.unsqueeze(-1)).nan_to_num(0.0)
    return scaled.round().clamp(-128, 127).to(torch.int8), largest / 127.0


@reference("npu::npu_moe_distribute_dispatch_v2")
def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    quant_mode: int = 0,
    expert_token_nums_type: int = 1,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """Rows received, their scales, marks for combine, rows per expert, running sums by (expert, rank), nothing of a
    tensor-parallel group, and the rows' weights. Behind the rows received everything is undefined: NaN here.
    """
    op = "npu_moe_distribute_dispatch_v2"
    call = check_call(op, x, expert_ids, (group_ep, ep_world_size, ep_rank_id), moe_expert_num, others)
    given = {
        "scales": scales,
        "expert_scales": expert_scales,
        "quant_mode": quant_mode,
        "expert_token_nums_type": expert_token_nums_type,
    }
    check_dispatch(call, x, given)
    plan = _plan(call, expert_ids, active_choices(call, expert_ids, x_active_mask))
    counts = _exchange_counts(call, plan, quant_mode, x.element_size(), x_active_mask is not None)
    rows, columns = x[plan.token], []
    if quant_mode == 2:
        rows, scale = _quantize(rows, None if scales is None else scales[plan.expert])
        columns.append(scale)
    if expert_scales is not None:
        columns.append(expert_scales[plan.token, plan.choice])
    marks = torch.stack([torch.full_like(plan.token, call.group.rank), plan.token, plan.choice], dim=1).int()
    packed = torch.cat([_bytes(part) for part in (marks, *(c[:, None] for c in columns), rows)], dim=1)
    packed = _move(call, Step.DISPATCH, packed, plan.sizes(), counts.sum(1).tolist())
    return _results(call, counts, packed, rows.dtype, given)


def _move(call: Call, step: Step, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    """uint8 [rows, width] by receiving rank → by sending rank."""
    width = rows.shape[1]
    pieces = [piece.flatten() for piece in rows.split(send)]
    return torch.cat(call.group.exchange(step, pieces, [count * width for count in receive])).view(-1, width)


def _results(
    call: Call, counts: torch.Tensor, packed: torch.Tensor, dtype: torch.dtype, given: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The operator's results of what has come in, by sending rank and then by expert as ``counts`` tells."""
    layout, local, count, room = call.layout, call.local_experts, packed.shape[0], call.rows
    expert = torch.arange(local).repeat(layout.ranks).repeat_interleave(counts.flatten())
    packed = packed[expert.argsort(stable=True)]
    quantized, weighted = given["quant_mode"] == 2, given["expert_scales"] is not None
    marks, scale, weight, rows = packed.split(
        [4 * MARKS, 4 * quantized, 4 * weighted, packed.shape[1] - 4 * (MARKS + quantized + weighted)], dim=1
    )
    expand_x = torch.full((room, layout.hidden), -128 if quantized else float("nan"), dtype=dtype)
    expand_x[:count] = rows.contiguous().view(dtype)
    assist = torch.empty(max(call.tokens * layout.top_k, room * 128), dtype=torch.int32)
    assist[: room * 128].view(room, 128)[:count, :MARKS] = marks.contiguous().view(torch.int32)
    per_expert = counts.sum(0)
    sums = counts.t().flatten().cumsum(0).int()
    if weighted:
        sums = torch.cat([sums, sums.new_zeros(call.reserved)])
    return (
        expand_x,
        _column(room, scale) if quantized else torch.full((room,), float("nan")),
        assist,
        per_expert if given["expert_token_nums_type"] == 1 else per_expert.cumsum(0),
        sums,
        torch.zeros(call.tp_ranks, dtype=torch.int32),
        _column(room, weight) if weighted else torch.empty(0),
    )


def _column(room: int, values: torch.Tensor) -> torch.Tensor:
    column = torch.full((room,), float("nan"))
    column[: values.shape[0]] = values.contiguous().view(torch.float32)[:, 0]
    return column


@reference("npu::npu_moe_distribute_combine_v2")
def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Σ over a token's choices of weight · its row, and its rows of shared experts; summed in fp32. Tokens that take
    no part have no result: NaN here.
    """
    op = "npu_moe_distribute_combine_v2"
    call = check_call(op, expand_x, expert_ids, (group_ep, ep_world_size, ep_rank_id), moe_expert_num, others)
    check_combine(call, expand_x, assist_info_for_combine, ep_send_counts, expert_scales, expand_scales)
    active = active_choices(call, expert_ids, x_active_mask)
    plan, layout = _plan(call, expert_ids, active), call.layout
    ends = ep_send_counts[: layout.ranks * call.local_experts].long()
    table = ends.diff(prepend=ends.new_zeros(1)).view(call.local_experts, layout.ranks)
    if bool((table < 0).any()) or int(ends[-1]) > call.rows:
        raise wrong(op, "ep_send_counts are no running sums of a dispatch")
    sender = torch.arange(layout.ranks).repeat(call.local_experts).repeat_interleave(table.flatten())
    marks = assist_info_for_combine[: call.rows * 128].view(call.rows, 128)[: len(sender), :MARKS]
    require(
        torch.equal(marks[:, 0].long(), sender),
        op,
        "assist_info_for_combine and ep_send_counts are of two dispatches",
    )
    back = expand_x[: len(sender)][sender.argsort(stable=True)]
    packed = _move(call, Step.COMBINE, _bytes(back), table.sum(0).tolist(), plan.sizes())
    rows = torch.zeros(call.tokens, layout.top_k + layout.shared, layout.hidden)
    rows[plan.token, plan.choice] = packed.view(expand_x.dtype).float()
    weights = torch.cat([expert_scales, expert_scales.new_ones(call.tokens, layout.shared)], dim=1)
    out = (rows * weights.unsqueeze(-1)).sum(1)
    out[~active.any(1)] = float("nan")
    return out.to(expand_x.dtype)
