"""Products with 4-bit weights and activations in half precision.

A weight is scale · (q + offset), with q within −8 … 7 and one scale (and offset) for each output channel, or for each
group of inputs of it.
"""

import torch
import torch_npu


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int32 [k, n] with values within −8 … 7, contiguous, n a multiple of 8 → int32 [k, n / 8]."""
    return torch_npu.npu_convert_weight_to_int4pack(values)


def pack_int4_experts(values: torch.Tensor) -> torch.Tensor:
    """int32 [experts, k, n] → int32 [experts, k, n / 8], as :func:`pack_int4`."""
    experts, k, n = values.shape
    return pack_int4(values.view(experts * k, n)).view(experts, k, n // 8)


def grouped_int4_matmul(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """rows [r, k] times each expert's matrix of 4-bit values: [r, n], undefined beyond the sum of ``counts``.

    :param rows: in bf16 or fp16, sorted by expert.
    :param weight: of :func:`pack_int4_experts`.
    :param scale: and ``offset``, in the dtype of rows: [experts, n], or [experts, groups, n] where groups divide k.
    :param counts: int64 [experts] on the device: how many rows, in order, are each expert's.
    """
    (out,) = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        antiquant_scale=[scale],
        antiquant_offset=[offset],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    return out


Int4Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Weight, scale and offset of :func:`grouped_int4_matmul`."""


def int4_feed_forward(
    rows: torch.Tensor, gate_up: Int4Matrix, down: Int4Matrix, counts: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts with 4-bit weights: down(silu(gate · x) · (up · x)) for rows sorted by expert.

    :param rows: [r, hidden] in bf16 or fp16.
    :returns: [r, hidden], undefined beyond the sum of ``counts``.
    """
    both = grouped_int4_matmul(rows, *gate_up, counts)
    return grouped_int4_matmul(torch_npu.npu_swiglu(both), *down, counts)


def int4_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    group: int = 0,
) -> torch.Tensor:
    """x · (scale · (weight + offset)) + bias: [tokens, n].

    :param x: [tokens, k] in bf16 or fp16.
    :param weight: of :func:`pack_int4`, int32 [k, n / 8].
    :param scale: and ``offset``, in the dtype of x: [1, n], or [k / group, n].
    :param bias: [n], fp32 for bf16 and fp16 for fp16.
    :param group: inputs that share a scale, a multiple of 32 below k; 0 where all do.
    """
    return torch_npu.npu_weight_quant_batchmatmul(
        x, weight, scale, antiquant_offset=offset, bias=bias, antiquant_group_size=group
    )
