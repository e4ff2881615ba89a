"""Reference of the grouped matrix product: one product per expert over that expert's rows."""

import torch

from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype, wrong
from .registry import reference

Tensors = list[torch.Tensor]

DEFAULTS = {
    "bias": None,
    "scale": None,
    "offset": None,
    "antiquant_scale": None,
    "antiquant_offset": None,
    "per_token_scale": None,
    "activation_input": None,
    "activation_quant_scale": None,
    "activation_quant_offset": None,
    "act_type": 0,
    "tuning_config": None,
    "output_dtype": None,
    "x_dtype": None,
    "weight_dtype": None,
    "scale_dtype": None,
    "per_token_scale_dtype": None,
}


def _group_ends(
    op: str, group_list: torch.Tensor | None, list_type: int, groups: int, rows: int
) -> list[int]:
    """Where each group's rows end, from the device's list of running sums (type 0) or sizes (1)."""
    if group_list is None:
        raise wrong(op, "group_list is None")
    require_dtype(op, "group_list", group_list, (torch.int64,))
    require_contiguous(op, group_list=group_list)
    if tuple(group_list.shape) != (groups,):
        raise wrong(op, f"group_list {tuple(group_list.shape)} must be [{groups}], one number per expert")
    require(
        list_type in (0, 1), op, f"group_list_type is {list_type}, allowed are 0 (running sums) and 1 (sizes)"
    )
    ends = (group_list if list_type == 0 else group_list.cumsum(0)).tolist()
    if any(end < start for start, end in zip([0, *ends], ends, strict=False)):
        raise wrong(op, "group_list holds a negative size" if list_type else "group_list falls")
    if ends[-1] > rows:
        raise wrong(op, f"group_list asks for {ends[-1]} rows, x has {rows}")
    return ends


@reference("npu::npu_grouped_matmul")
def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: object,
) -> Tensors:
    """[x_g · weight_g] of each group of rows, as one tensor; rows beyond the last group are undefined (NaN here).

    Of the operator's forms only this one has a reference: one x [rows, k], one weight [experts, k, n], groups
    along the rows (``group_type`` 0), one result (``split_item`` 2 or 3).
    """
    op = "npu_grouped_matmul"
    refuse_arguments(op, others, DEFAULTS)
    if len(x) != 1 or len(weight) != 1 or weight[0].dim() != 3 or group_type != 0 or split_item not in (2, 3):
        raise NotImplementedError(
            f"{op}: no reference for {len(x)} x and {len(weight)} weights with group_type={group_type} and "
            f"split_item={split_item} (only one x, one weight [experts, k, n], group_type 0 and split_item 2 or 3)"
        )
    rows, experts = x[0], weight[0]
    require_dtype(op, "x", rows, FLOATS)
    require_dtype(op, "weight", experts, (rows.dtype,))
    require(rows.dim() == 2, op, f"x has {rows.dim()} dimensions, it must have 2")
    require_contiguous(op, x=rows)
    # A weight stored as [experts, n, k] may be passed as its transposed view; any other stride is read wrongly.
    if not (experts.is_contiguous() or experts.transpose(1, 2).is_contiguous()):
        raise wrong(op, f"weight is neither contiguous nor a transposed view: strides {experts.stride()}")
    if rows.shape[1] != experts.shape[1]:
        raise wrong(op, f"x {tuple(rows.shape)} and weight {tuple(experts.shape)} disagree on k")
    ends = _group_ends(op, group_list, int(group_list_type or 0), experts.shape[0], rows.shape[0])
    out = rows.new_full((rows.shape[0], experts.shape[2]), float("nan"))
    start = 0
    for expert, end in zip(experts, ends, strict=True):
        if end > start:
            torch.mm(rows[start:end], expert, out=out[start:end])
        start = end
    return [out]
