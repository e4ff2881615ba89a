"""References of 8-bit quantization and of products of quantized tensors.

Formulas and limits are those of torch_npu's documentation of each operator (``op-plugin``, custom APIs), for Atlas
A2 and A3. Integer sums are exact; scales are applied in fp32, and the result is rounded once.
"""

import torch

from .checks import refuse_arguments, require, require_contiguous, require_dtype, wrong
from .registry import reference

HALVES = (torch.float16, torch.bfloat16)
INT8_TYPES = (None, 1, torch.int8)
"""How a caller may name int8: not at all, by torch's number of the type, or by the type."""
MAX_INNER = 65535


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp(-128, 127).to(torch.int8)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [..., k] as int8 and scales [..., 1]: scale = max|x| / 127 of a row, round(x / scale)."""
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    # Rows that an earlier operator left undefined are NaN here; integers have no NaN, their scale keeps it.
    return _to_int8((x / torch.where(scale == 0, 1.0, scale)).nan_to_num(0.0)), scale


@reference("npu::npu_dynamic_quant")
def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = max|x| / 127 of each row, y = round(x / scale); a row of zeros stays zeros."""
    op = "npu_dynamic_quant"
    require_dtype(op, "input", input, HALVES)
    require(input.dim() > 1, op, f"input has {input.dim()} dimensions, it must have more than 1")
    require(dst_type in INT8_TYPES, op, f"dst_type is {dst_type}, only int8 is computed")
    refuse_arguments(
        op,
        {"smooth_scales": smooth_scales, "group_index": group_index, "quant_mode": quant_mode},
        {"smooth_scales": None, "group_index": None, "quant_mode": "pertoken"},
    )
    refuse_arguments(op, {"dst_type_max": dst_type_max}, {"dst_type_max": 0.0})
    values, scale = quantize_tokens(input.float())
    return values, scale.squeeze(-1)


@reference("npu::npu_quantize")
def npu_quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """round(input / scales) + zero_points within int8, with one scale for all or one for each element of axis."""
    op = "npu_quantize"
    require_dtype(op, "input", input, (torch.float32, *HALVES))
    require(torch.qint8 in (dtype, _dtype_of(dtype)), op, f"dtype is {dtype}, only torch.qint8 is computed")
    if not div_mode:
        raise NotImplementedError(f"{op}: no reference for div_mode=False (only True)")
    require_dtype(op, "scales", scales, (torch.float32, torch.bfloat16))
    require(-input.dim() <= axis < input.dim(), op, f"axis is {axis}, input has {input.dim()} dimensions")
    size = input.shape[axis]
    require(
        scales.dim() == 1 and scales.shape[0] in (1, size),
        op,
        f"scales {tuple(scales.shape)} must be [1] or [{size}]",
    )
    shape = [1] * input.dim()
    shape[axis] = -1
    values = (input.float() / scales.float().view(shape)).round()
    if zero_points is not None:
        require_dtype(op, "zero_points", zero_points, (torch.int8, torch.int32))
        require(
            zero_points.shape == scales.shape,
            op,
            f"zero_points {tuple(zero_points.shape)} must be as scales {tuple(scales.shape)}",
        )
        values = values + zero_points.float().view(shape)
    return _to_int8(values)


def _dtype_of(number: object) -> torch.dtype | None:
    """torch's quantized dtype of a ScalarType number."""
    return (
        {12: torch.qint8, 13: torch.quint8, 14: torch.qint32}.get(number) if isinstance(number, int) else None
    )


def result_dtype(op: str, output_dtype: object) -> torch.dtype:
    """bf16 or fp16, from the dtype or from torch's number of it."""
    known = {15: torch.bfloat16, 5: torch.float16}
    dtype = known.get(output_dtype, output_dtype) if isinstance(output_dtype, int) else output_dtype
    if dtype not in HALVES:
        raise NotImplementedError(f"{op}: no reference for output_dtype={output_dtype} (only bf16 and fp16)")
    assert isinstance(dtype, torch.dtype)
    return dtype


def require_matrix(op: str, name: str, weight: torch.Tensor) -> None:
    """Refuse a weight that is neither contiguous nor a transposed view: any other stride is read wrongly."""
    if not (weight.is_contiguous() or weight.transpose(-1, -2).is_contiguous()):
        raise wrong(op, f"{name} is neither contiguous nor a transposed view: strides {weight.stride()}")


def _check_product(op: str, x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor) -> None:
    for name, tensor in (("x1", x1), ("x2", x2)):
        require_dtype(op, name, tensor, (torch.int8,))
        if tensor.dim() != 2:
            raise NotImplementedError(
                f"{op}: no reference for {name} with {tensor.dim()} dimensions (only 2)"
            )
        require(tensor.numel() > 0, op, f"{name} {tuple(tensor.shape)} is empty")
        require(tensor.shape[-1] <= MAX_INNER, op, f"{name} has {tensor.shape[-1]} columns, at most 65535")
    require(x1.shape[1] == x2.shape[0], op, f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} disagree on k")
    require_contiguous(op, x1=x1)
    require_matrix(op, "x2", x2)
    n = x2.shape[1]
    require(
        scale.dim() == 1 and scale.shape[0] in (1, n), op, f"scale {tuple(scale.shape)} must be [1] or [{n}]"
    )


def _check_forms(
    op: str,
    out: torch.dtype,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
) -> None:
    """The combinations of dtypes that the documentation's table allows."""
    bfloat = out == torch.bfloat16
    require_dtype(op, "scale", scale, (torch.float32, torch.bfloat16) if bfloat else (torch.float32,))
    if pertoken_scale is not None:
        require_dtype(op, "pertoken_scale", pertoken_scale, (torch.float32,))
        require_contiguous(op, pertoken_scale=pertoken_scale)
        require(
            tuple(pertoken_scale.shape) == shape[:1],
            op,
            f"pertoken_scale {tuple(pertoken_scale.shape)} must be [{shape[0]}]",
        )
    if bias is not None:
        allowed: tuple[torch.dtype, ...] = (torch.int32,)
        if bfloat:
            allowed = (torch.int32, torch.bfloat16, torch.float32)
        elif pertoken_scale is not None:
            allowed = (torch.int32, torch.float16, torch.float32)
        require_dtype(op, "bias", bias, allowed)
        require(tuple(bias.shape) == shape[1:], op, f"bias {tuple(bias.shape)} must be [{shape[1]}]")


@reference("npu::npu_quant_matmul")
def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x1 · x2 + int32 bias) · scale · pertoken_scale + float bias, in bf16 or fp16."""
    op = "npu_quant_matmul"
    others = {
        "offset": offset,
        "x1_dtype": x1_dtype,
        "x2_dtype": x2_dtype,
        "pertoken_scale_dtype": pertoken_scale_dtype,
        "scale_dtype": scale_dtype,
        "group_sizes": group_sizes or None,
        "y_scale": y_scale,
    }
    refuse_arguments(op, others, dict.fromkeys(others))
    _check_product(op, x1, x2, scale)
    out = result_dtype(op, output_dtype)
    _check_forms(op, out, scale, pertoken_scale, bias, (x1.shape[0], x2.shape[1]))
    sums = torch._int_mm(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    result = sums.float() * scale.float()
    if pertoken_scale is not None:
        result = result * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        result = result + bias.float()
    return result.to(out)
