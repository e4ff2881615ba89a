"""Products of 8-bit integers: quantizing activations, and multiplying them with quantized weights.

Symmetric int8 throughout: value = scale · integer. Weights have one scale for each output channel, activations one
for each token (dynamic) or one for all (static). Sums are int32 and exact; a result is rounded once, to its dtype.
"""

import torch
import torch_npu


def dynamic_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token by its own largest magnitude: scale = max|x| / 127, q = round(x / scale).

    :param x: [tokens, k] in fp16 or bf16.
    :returns: int8 [tokens, k] and scales fp32 [tokens].
    """
    return torch_npu.npu_dynamic_quant(x)


def static_quantize(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """All tokens by one scale: q = round(x / scale) + zero point, kept within −128 … 127.

    :param x: [tokens, k] in fp16 or bf16.
    :param scale: fp32 [1].
    :param zero_point: int32 [1], None for 0.
    :returns: int8 [tokens, k].
    """
    return torch_npu.npu_quantize(x, scale, zero_point, torch.qint8, -1, True)


def quant_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    token_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(x · weight) · scale · token_scale + bias; an int32 bias is added to the sums instead, before the scales.

    :param x: int8 [tokens, k].
    :param weight: int8 [k, n], contiguous or the transposed view of [n, k].
    :param scale: fp32 [n].
    :param token_scale: fp32 [tokens]; None for 1. fp16 results without it have the scale in ``scale`` alone.
    :param bias: fp32, bf16 or int32 [n].
    :param dtype: of the result, bf16 or fp16.
    :returns: [tokens, n].
    """
    return torch_npu.npu_quant_matmul(
        x, weight, scale, pertoken_scale=token_scale, bias=bias, output_dtype=dtype
    )


def grouped_quant_matmul(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    counts: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Quantized rows times each expert's quantized matrix: [r, n], undefined beyond the sum of ``counts``.

    :param rows: int8 [r, k], sorted by expert; ``row_scale`` fp32 [r].
    :param weight: int8 [experts, k, n].
    :param scale: [experts, n]; bf16 where ``dtype`` is bf16, fp32 where it is fp16.
    :param counts: int64 [experts] on the device: how many rows, in order, are each expert's.
    """
    (out,) = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        scale=[scale],
        per_token_scale=[row_scale],
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
        output_dtype=dtype,
    )
    return out


def quant_feed_forward(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """SwiGLU experts with int8 weights and dynamic activations: down(silu(gate · x) · (up · x)).

    :param rows: [r, hidden] in bf16 or fp16, sorted by expert.
    :param gate_up: int8 [experts, hidden, 2 · intermediate], the gate first.
    :param down: int8 [experts, intermediate, hidden].
    :param gate_up_scale: and ``down_scale``, as in :func:`grouped_quant_matmul`.
    :returns: [r, hidden], undefined beyond the sum of ``counts``.
    """
    quantized, row_scale = dynamic_quantize(rows)
    return int8_feed_forward(
        quantized, row_scale, gate_up, gate_up_scale, down, down_scale, counts, rows.dtype
    )


def int8_feed_forward(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    counts: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`quant_feed_forward` for rows that are quantized already.

    :param rows: int8 [r, hidden], sorted by expert; ``row_scale`` fp32 [r].
    :param dtype: of the result, bf16 or fp16.
    :returns: [r, hidden], undefined beyond the sum of ``counts``.
    """
    both = grouped_quant_matmul(rows, row_scale, gate_up, gate_up_scale, counts, dtype)
    quantized, row_scale = dynamic_quantize(torch_npu.npu_swiglu(both))
    return grouped_quant_matmul(quantized, row_scale, down, down_scale, counts, dtype)
