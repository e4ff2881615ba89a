"""References of products with packed 4-bit weights (torch_npu's documentation of each operator, Atlas A2 and A3)."""

import torch

from .checks import refuse_arguments, require, require_contiguous, require_dtype
from .quant import HALVES, MAX_INNER
from .registry import reference

NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
"""Where the eight values of an int32 begin, the first in the lowest bits."""


@reference("npu::npu_convert_weight_to_int4pack")
def npu_convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Eight values of the last dimension in each int32."""
    op = "npu_convert_weight_to_int4pack"
    require_dtype(op, "weight", weight, (torch.int32,))
    require_contiguous(op, weight=weight)
    require(weight.dim() == 2, op, f"weight has {weight.dim()} dimensions, it must have 2")
    require(
        weight.shape[1] % 8 == 0,
        op,
        f"weight {tuple(weight.shape)}: the last dimension must be a multiple of 8",
    )
    require(inner_k_tiles == 0, op, f"inner_k_tiles is {inner_k_tiles}, only 0 is allowed")
    low, high = int(weight.min()), int(weight.max())
    require(-8 <= low <= high <= 7, op, f"weight holds {low} to {high}, allowed are -8 to 7")
    nibbles = (weight & 15).unflatten(1, (-1, 8)) << NIBBLES
    return nibbles.sum(-1).to(torch.int32)  # the bits are apart, so the sum joins them


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """fp32 […, n] of int32 […, n / 8]."""
    return ((((weight.unsqueeze(-1) >> NIBBLES) & 15) ^ 8) - 8).flatten(-2).float()


def _check_scales(
    op: str,
    x: torch.Tensor,
    shape: tuple[int, int],
    group: int,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
) -> None:
    k, n = shape
    if group:
        require(
            group % 32 == 0 and 32 <= group < k,
            op,
            f"antiquant_group_size is {group}, it must be a multiple of 32 from 32 to {k - 1}",
        )
    wanted = [(-(-k // group), n)] if group else [(1, n), (n,)]
    for name, tensor in (("antiquant_scale", scale), ("antiquant_offset", offset)):
        if tensor is not None:
            require_dtype(op, name, tensor, (x.dtype,))
            require(
                tuple(tensor.shape) in wanted, op, f"{name} {tuple(tensor.shape)} must be {list(wanted[0])}"
            )
    require(
        offset is None or offset.shape == scale.shape, op, "antiquant_offset must have the shape of the scale"
    )


@reference("npu::npu_weight_quant_batchmatmul")
def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """x · (scale · (weight + offset)) + bias with 4-bit weights packed along n."""
    op = "npu_weight_quant_batchmatmul"
    others = {"quant_scale": quant_scale, "quant_offset": quant_offset, "weight_dtype": weight_dtype}
    refuse_arguments(op, others, dict.fromkeys(others))
    require(inner_precise == 0, op, f"inner_precise is {inner_precise}, only 0 (precise) is computed")
    require_dtype(op, "x", x, HALVES)
    if weight.dtype != torch.int32:
        raise NotImplementedError(f"{op}: no reference for weight of {weight.dtype} (only packed int32)")
    require(x.dim() == 2 and weight.dim() == 2, op, "x and weight must have 2 dimensions")
    require_contiguous(op, x=x, weight=weight)
    k, n = weight.shape[0], weight.shape[1] * 8
    require(x.shape[1] == k, op, f"x {tuple(x.shape)} and weight [{k}, {n}] disagree on k")
    require(
        x.numel() > 0 and max(k, n) <= MAX_INNER, op, f"x {tuple(x.shape)} is empty, or more than 65535 wide"
    )
    group = antiquant_group_size
    _check_scales(op, x, (k, n), group, antiquant_scale, antiquant_offset)
    values = unpack(weight)
    scale = antiquant_scale.float().view(-1, n)
    if antiquant_offset is not None:
        values = values + _by_input(antiquant_offset.float().view(-1, n), group, k)
    result = x.float() @ (values * _by_input(scale, group, k))
    if bias is not None:
        require_dtype(op, "bias", bias, (torch.float32 if x.dtype == torch.bfloat16 else torch.float16,))
        require(bias.shape[-1:] == (n,) and bias.numel() == n, op, f"bias {tuple(bias.shape)} must be [{n}]")
        result = result + bias.float().view(1, n)
    return result.to(x.dtype)


def _by_input(groups: torch.Tensor, group: int, k: int) -> torch.Tensor:
    return groups.repeat_interleave(group, 0)[:k] if group else groups
