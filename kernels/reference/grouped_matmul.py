"""Reference of the grouped matrix product: one product per expert over that expert's rows."""

import torch

from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype, wrong
from .quant import HALVES, require_matrix, result_dtype
from .quant_weight import unpack
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


def _scales(
    op: str, rows: torch.Tensor, experts: torch.Tensor, out: torch.dtype, given: dict[str, object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts' scales [experts, n] and the rows' [r] of a quantized product, in fp32."""
    pair = [given.pop(name, None) for name in ("scale", "per_token_scale")]
    for name, value in zip(("scale", "per_token_scale"), pair, strict=True):
        require(
            isinstance(value, list) and len(value) == 1, op, f"{name} must be a list of one tensor for int8"
        )
    scale, row_scale = (x[0] for x in pair if isinstance(x, list))
    require_dtype(op, "scale", scale, (torch.bfloat16 if out == torch.bfloat16 else torch.float32,))
    require_dtype(op, "per_token_scale", row_scale, (torch.float32,))
    require_contiguous(op, scale=scale, per_token_scale=row_scale)
    wanted = (experts.shape[0], experts.shape[2])
    require(tuple(scale.shape) == wanted, op, f"scale {tuple(scale.shape)} must be {list(wanted)}")
    require(
        tuple(row_scale.shape) == (rows.shape[0],),
        op,
        f"per_token_scale {tuple(row_scale.shape)} must be [{rows.shape[0]}]",
    )
    return scale.float(), row_scale


def _four_bits(op: str, rows: torch.Tensor, packed: torch.Tensor, given: dict[str, object]) -> torch.Tensor:
    """fp32 [experts, k, n]: scale · (weight + offset), with one of each for an output channel [experts, n], or for a
    group of inputs of it [experts, groups, n].
    """
    require_dtype(op, "x", rows, HALVES)
    require_contiguous(op, weight=packed)
    experts, k, n = packed.shape[0], packed.shape[1], packed.shape[2] * 8
    found = []
    for name in ("antiquant_scale", "antiquant_offset"):
        value = given.pop(name, None)
        if not isinstance(value, list) or len(value) != 1:
            raise wrong(op, f"{name} must be a list of one tensor for 4-bit weights")
        (tensor,) = value
        require_dtype(op, name, tensor, (rows.dtype,))
        require_contiguous(op, **{name: tensor})
        groups = tensor.shape[1] if tensor.dim() == 3 else 1
        right = tuple(tensor.shape) in ((experts, n), (experts, groups, n)) and k % groups == 0
        require(right, op, f"{name} {tuple(tensor.shape)} does not fit {experts} experts of [{k}, {n}]")
        found.append(tensor.float().view(experts, groups, n))
    require(found[0].shape == found[1].shape, op, "antiquant_offset must have the shape of antiquant_scale")
    scale, offset = (part.repeat_interleave(k // part.shape[1], 1) for part in found)
    return scale * (unpack(packed) + offset)


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
    along the rows (``group_type`` 0), one result (``split_item`` 2 or 3). int8 rows and weights have scales, of
    each expert's output channel and of each row, and a result in bf16 or fp16. Weights of four bits, eight in an
    int32 along n, have scales and offsets, and rows in half precision.
    """
    op = "npu_grouped_matmul"
    if len(x) != 1 or len(weight) != 1 or weight[0].dim() != 3 or group_type != 0 or split_item not in (2, 3):
        raise NotImplementedError(
            f"{op}: no reference for {len(x)} x and {len(weight)} weights with group_type={group_type} and "
            f"split_item={split_item} (only one x, one weight [experts, k, n], group_type 0 and split_item 2 or 3)"
        )
    rows, experts = x[0], weight[0]
    quantized, packed = rows.dtype == torch.int8, experts.dtype == torch.int32
    require_dtype(op, "x", rows, (*FLOATS, torch.int8))
    if packed:
        experts = _four_bits(op, rows, experts, others)
    else:
        require_dtype(op, "weight", experts, (rows.dtype,))
    require(rows.dim() == 2, op, f"x has {rows.dim()} dimensions, it must have 2")
    require_contiguous(op, x=rows)
    require_matrix(op, "weight", experts)
    if rows.shape[1] != experts.shape[1]:
        raise wrong(op, f"x {tuple(rows.shape)} and weight {tuple(experts.shape)} disagree on k")
    dtype = result_dtype(op, others.pop("output_dtype", None)) if quantized else rows.dtype
    scales = _scales(op, rows, experts, dtype, others) if quantized else None
    refuse_arguments(op, others, DEFAULTS)
    ends = _group_ends(op, group_list, int(group_list_type or 0), experts.shape[0], rows.shape[0])
    out = torch.full((rows.shape[0], experts.shape[2]), float("nan"), dtype=dtype)
    start = 0
    for index, end in enumerate(ends):
        if end > start and packed:
            out[start:end] = (rows[start:end].float() @ experts[index]).to(dtype)
        elif end > start and scales is None:
            torch.mm(rows[start:end], experts[index], out=out[start:end])
        elif end > start and scales is not None:
            sums = torch._int_mm(rows[start:end], experts[index]).float()
            out[start:end] = (sums * scales[0][index] * scales[1][start:end, None]).to(dtype)
        start = end
    return [out]
