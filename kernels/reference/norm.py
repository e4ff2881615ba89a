"""References of the RMS norms.

The mean square, its inverse root and the product with the weight are computed in float32 and rounded once
to the input's dtype (CANN's aclnnRmsNorm, aclnnAddRmsNorm, aclnnGemmaRmsNorm: y = x / sqrt(mean(x²) + ε) ·
γ).
"""

import torch

from .checks import FLOATS, require_dtype, wrong
from .registry import reference


def _check(op: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    require_dtype(op, "x", x, FLOATS)
    if gamma.dtype != x.dtype:
        raise wrong(op, f"gamma is {gamma.dtype}, x is {x.dtype}; they must be equal")
    if not 0 < gamma.dim() <= x.dim() or x.shape[x.dim() - gamma.dim() :] != gamma.shape:
        raise wrong(op, f"gamma {tuple(gamma.shape)} must equal the last dimensions of x {tuple(x.shape)}")


def _normalize(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        rstd_shape = x.shape[: x.dim() - gamma.dim()] + (1,) * gamma.dim()
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(
            rstd_shape, dtype=torch.float32
        )
    y, rstd = torch.ops.aten._fused_rms_norm(x, list(gamma.shape), gamma, epsilon)
    return y, rstd


@reference("npu::npu_rms_norm")
def npu_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x²) + ε) · γ over γ's dimensions. Returns (y like x, the inverse root in float32)."""
    _check("npu_rms_norm", self, gamma)
    return _normalize(self, gamma, epsilon)


@reference("npu::npu_add_rms_norm")
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The RMS norm of x1 + x2. Returns (y, the inverse root in float32, x1 + x2), the sum rounded to the
    dtype first.
    """
    op = "npu_add_rms_norm"
    _check(op, x1, gamma)
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        raise wrong(op, f"x2 {tuple(x2.shape)} {x2.dtype} must be like x1 {tuple(x1.shape)} {x1.dtype}")
    total = x1 + x2
    y, rstd = _normalize(total, gamma, epsilon)
    return y, rstd, total


@reference("npu::npu_gemma_rms_norm")
def npu_gemma_rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x²) + ε) · (1 + γ), 1 + γ in float32. Returns (y like x, the inverse root in float32)."""
    op = "npu_gemma_rms_norm"
    _check(op, self, gamma)
    if not self.is_contiguous():
        raise wrong(op, "x is not contiguous")
    y, rstd = _normalize(self.float(), gamma.float() + 1.0, epsilon)
    return y.to(self.dtype), rstd
