"""Products with 4-bit weights and activations in half precision.

A weight is scale · (q + offset), with q within −8 … 7 and one scale (and offset) for each output channel, or for each
group of inputs of it.
"""

import torch
import torch_npu


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int32 [k, n] with values within −8 … 7, contiguous, n a multiple of 8 → int32 [k, n / 8]."""
    return torch_npu.npu_convert_weight_to_int4pack(values)


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
