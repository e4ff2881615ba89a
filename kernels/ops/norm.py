"""RMS norms. Formula: y = x / sqrt(mean(x²) + ε) · w over the last dimension (Zhang and Sennrich, 2019)."""

import torch
import torch_npu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of x [..., d] with weight [d], both of one dtype (fp32, fp16, bf16). Returns a tensor like
    x.
    """
    return torch_npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of x + residual, both [..., d] of one dtype with weight [d].

    Returns (normed, x + residual); the inputs stay as they are.
    """
    normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm as Gemma stores it: weight [d] holds w − 1, so the factor is 1 + weight. x [..., d] of one
    dtype.
    """
    return torch_npu.npu_gemma_rms_norm(x.contiguous(), weight, eps)[0]


def gemma_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gemma_rms_norm` of x + residual. Returns (normed, x + residual).

    torch_npu has no fused add for the Gemma form; adding 1 to the weight beforehand would round it in bf16.
    """
    total = x + residual
    return torch_npu.npu_gemma_rms_norm(total, weight, eps)[0], total
