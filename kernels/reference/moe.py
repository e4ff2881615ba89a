"""References of mixture-of-experts routing: choosing experts, sorting rows by expert, summing the experts' rows.

Rows that the device leaves uninitialised are filled with NaN here, so that a caller who reads them is found out.
Formulas and limits are those of torch_npu's documentation of each operator (``op-plugin``, custom APIs).
"""

import torch

from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype, wrong
from .registry import reference

MAX_TOP_K = 1024
MAX_GATED_EXPERTS = 2048
MAX_ROUTED_EXPERTS = 10240
GROUP_ALIGNMENT = 32


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of each row, the lower index first among equals."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k]


@reference("npu::npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of softmax(x), their experts, and the row numbers k · rows + row of the older routing."""
    op = "npu_moe_gating_top_k_softmax"
    require_dtype(op, "x", x, FLOATS)
    require(x.dim() in (2, 3), op, f"x has {x.dim()} dimensions, allowed are 2 and 3")
    require(
        0 < k <= min(x.shape[-1], MAX_TOP_K), op, f"k is {k}, allowed are 1 to {min(x.shape[-1], MAX_TOP_K)}"
    )
    refuse_arguments(op, {"finished": finished}, {"finished": None})
    scores = x.float().softmax(-1)
    experts = _largest(scores, k)
    rows = x.numel() // x.shape[-1]
    numbers = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(experts.shape)
    return scores.gather(-1, experts).to(x.dtype), experts.int(), numbers.contiguous()


def _check_gating(
    op: str, x: torch.Tensor, k: int, bias: torch.Tensor | None, k_group: int, group_count: int
) -> None:
    require_dtype(op, "x", x, FLOATS)
    require(x.dim() == 2, op, f"x has {x.dim()} dimensions, it must have 2")
    experts = x.shape[1]
    require(
        experts <= MAX_GATED_EXPERTS, op, f"x has {experts} experts, at most {MAX_GATED_EXPERTS} are allowed"
    )
    require(
        group_count > 0 and experts % group_count == 0,
        op,
        f"group_count is {group_count}, it must divide {experts} experts",
    )
    per_group = experts // group_count
    require(per_group > 2, op, f"{experts} experts in {group_count} groups: a group must hold more than 2")
    aligned = -(-per_group // GROUP_ALIGNMENT) * GROUP_ALIGNMENT * group_count
    require(
        aligned <= MAX_GATED_EXPERTS,
        op,
        f"{group_count} groups of {per_group} experts fill {aligned} places, at most {MAX_GATED_EXPERTS} are allowed",
    )
    require(1 <= k_group <= group_count, op, f"k_group is {k_group}, allowed are 1 to {group_count}")
    require(1 <= k <= per_group * k_group, op, f"k is {k}, allowed are 1 to {per_group * k_group}")
    if bias is not None:
        require_dtype(op, "bias", bias, (x.dtype,))
        require(tuple(bias.shape) == (experts,), op, f"bias {tuple(bias.shape)} must be [{experts}]")


@reference("npu::npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of the k experts chosen among the best groups, the experts, and all scores if asked for.

    ``norm_type`` 0 is softmax, 1 is sigmoid, whose chosen scores are divided by their sum + eps. The bias decides
    the choice and not the score. A group counts by its best expert (``group_select_mode`` 0) or its best two (1).
    """
    op = "npu_moe_gating_top_k"
    _check_gating(op, x, k, bias, k_group, group_count)
    require(renorm == 0, op, f"renorm is {renorm}, only 0 is allowed")
    require(norm_type in (0, 1), op, f"norm_type is {norm_type}, allowed are 0 (softmax) and 1 (sigmoid)")
    require(group_select_mode in (0, 1), op, f"group_select_mode is {group_select_mode}, allowed are 0 and 1")
    refuse_arguments(op, {"input_ids": input_ids, "tid2eid": tid2eid}, {"input_ids": None, "tid2eid": None})
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        best = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _largest(best, k_group), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _largest(choice, k)
    chosen = scores.gather(-1, experts)
    if norm_type == 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps)
    everything = scores if out_flag else torch.full_like(scores, float("nan"))
    return (chosen * routed_scaling_factor).to(x.dtype), experts.int(), everything


def _check_init_routing(
    op: str,
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    expert_num: int,
    active: list[int],
    modes: tuple[int, int],
) -> None:
    require_dtype(op, "x", x, FLOATS)
    require_dtype(op, "expert_idx", expert_idx, (torch.int32,))
    require(x.dim() == 2 and expert_idx.dim() == 2, op, "x and expert_idx must have 2 dimensions")
    require(x.shape[0] == expert_idx.shape[0], op, f"{x.shape[0]} rows but experts for {expert_idx.shape[0]}")
    require(0 < expert_num <= MAX_ROUTED_EXPERTS, op, f"expert_num is {expert_num}, allowed are 1 to 10240")
    require(
        len(active) == 2 and 0 <= active[0] < active[1] <= expert_num,
        op,
        f"active_expert_range is {active}, it must be a range within 0 … {expert_num}",
    )
    if expert_idx.numel() and not 0 <= int(expert_idx.min()) <= int(expert_idx.max()) < expert_num:
        raise wrong(op, f"expert_idx names an expert outside 0 … {expert_num - 1}")
    tokens_type, row_idx_type = modes
    require(tokens_type in (0, 1, 2), op, f"expert_tokens_num_type is {tokens_type}, allowed are 0, 1 and 2")
    require(row_idx_type in (0, 1), op, f"row_idx_type is {row_idx_type}, allowed are 0 and 1")


@reference("npu::npu_moe_init_routing_v2")
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x repeated once per chosen expert and sorted by expert, within the active range.

    Returns the rows, the place of each (row, choice) among them (−1 outside the range; or with ``row_idx_type`` 1
    the choice at each place), the rows per active expert (running sum with ``expert_tokens_num_type`` 0), and the
    scales, which without quantization hold nothing.
    """
    op = "npu_moe_init_routing_v2"
    active = list(active_expert_range or [0, expert_num])
    _check_init_routing(op, x, expert_idx, expert_num, active, (expert_tokens_num_type, row_idx_type))
    total = expert_idx.numel()
    refuse_arguments(
        op,
        {
            "scale": scale,
            "offset": offset,
            "drop_pad_mode": drop_pad_mode,
            "quant_mode": quant_mode,
            "x_dtype": x_dtype,
            "expert_tokens_num_type": expert_tokens_num_type if expert_tokens_num_type == 2 else 0,
            "active_num": -1 if active_num in (-1, 0, total) else active_num,
        },
        {
            "scale": None,
            "offset": None,
            "drop_pad_mode": 0,
            "quant_mode": -1,
            "x_dtype": None,
            "expert_tokens_num_type": 0,
            "active_num": -1,
        },
    )
    chosen = expert_idx.flatten().long()
    inside = (chosen >= active[0]) & (chosen < active[1])
    valid = int(inside.sum())
    order = torch.where(inside, chosen, MAX_ROUTED_EXPERTS + 1).argsort(stable=True)
    rows = x.new_full((total, x.shape[1]), float("nan"))
    rows[:valid] = x[order[:valid] // expert_idx.shape[1]]
    if row_idx_type == 1:
        index = torch.where(torch.arange(total) < valid, order, torch.iinfo(torch.int32).min).int()
    else:
        index = torch.full((total,), -1, dtype=torch.int32)
        index[order[:valid]] = torch.arange(valid, dtype=torch.int32)
    counts = torch.empty((), dtype=torch.int64)
    if expert_tokens_num_flag:
        counts = torch.bincount(chosen[inside] - active[0], minlength=active[1] - active[0])
        if expert_tokens_num_type == 0:
            counts = counts.cumsum(0)
    return rows, index, counts, torch.full((total,), float("nan"))


@reference("npu::npu_moe_finalize_routing")
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Σ over a token's choices of scale · its row, plus skip1 and skip2.

    ``drop_pad_mode`` 0 and 1 take the places column by column (choice · tokens + token), 2 and 3 row by row. In 1
    and 3 the rows are [experts, capacity, hidden] and a place of −1 adds nothing.
    """
    op = "npu_moe_finalize_routing"
    rows, places = expanded_permuted_rows, expanded_src_to_dst_row
    require_dtype(op, "expanded_permuted_rows", rows, FLOATS)
    require_dtype(op, "expanded_src_to_dst_row", places, (torch.int32,))
    require(drop_pad_mode in (0, 1, 2, 3), op, f"drop_pad_mode is {drop_pad_mode}, allowed are 0 to 3")
    drops = drop_pad_mode in (1, 3)
    wanted = 3 if drops else 2
    require(
        rows.dim() == wanted,
        op,
        f"rows have {rows.dim()} dimensions, drop_pad_mode {drop_pad_mode} wants {wanted}",
    )
    refuse_arguments(op, {"bias": bias}, {"bias": None})
    require(skip1 is not None or skip2 is None, op, "skip2 is given without skip1")
    require_contiguous(op, expanded_permuted_rows=rows, expanded_src_to_dst_row=places)
    choices = scales.shape[1] if scales is not None else int(k or 1)
    require(places.numel() % choices == 0, op, f"{places.numel()} places for {choices} choices of each token")
    tokens = places.numel() // choices
    if scales is not None:
        require_dtype(op, "scales", scales, (rows.dtype,))
        require(scales.shape[0] == tokens, op, f"scales {tuple(scales.shape)} must be [{tokens}, {choices}]")
    flat = rows.flatten(0, -2)
    if not drops:
        require(flat.shape[0] == places.numel(), op, f"{flat.shape[0]} rows for {places.numel()} places")
    elif rows.shape[0] < choices:
        raise wrong(op, f"{rows.shape[0]} experts are fewer than the {choices} choices of a token")
    if places.numel() and not (-1 if drops else 0) <= int(places.min()) <= int(places.max()) < flat.shape[0]:
        raise wrong(
            op, f"expanded_src_to_dst_row names a row outside {-1 if drops else 0} … {flat.shape[0] - 1}"
        )
    by_column = drop_pad_mode in (0, 1)
    table = (places.view(choices, tokens).t() if by_column else places.view(tokens, choices)).long()
    gathered = flat[table.clamp(min=0)].float()
    if drops:
        gathered = gathered.masked_fill((table < 0).unsqueeze(-1), 0.0)
    out = (gathered if scales is None else gathered * scales.float().unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            require_dtype(op, "skip", skip, (rows.dtype,))
            require(skip.shape == out.shape, op, f"skip {tuple(skip.shape)} must be {tuple(out.shape)}")
            out = out + skip.float()
    return out.to(rows.dtype)
