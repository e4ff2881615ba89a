"""Reference of the fused top-k / top-p filter of logits."""

import torch

from .checks import FLOATS, require, require_dtype
from .registry import reference

MAX_TOP_K = 1024  # what aclnnApplyTopKTopP takes at most


def _check(op: str, logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None) -> None:
    require_dtype(op, "logits", logits, FLOATS)
    require(logits.dim() == 2, op, f"logits has {logits.dim()} dimensions, it must have 2")
    require(p is not None or k is not None, op, "p and k are both None")
    for name, tensor, dtype in (("p", p, logits.dtype), ("k", k, torch.int32)):
        if tensor is None:
            continue
        require_dtype(op, name, tensor, (dtype,))
        require(
            tuple(tensor.shape) == (logits.shape[0],), op, f"{name} {tuple(tensor.shape)} must be [batch]"
        )
    if p is not None and p.numel():
        require(bool(((p >= 0) & (p <= 1)).all()), op, "p must lie in [0, 1]")
    if k is not None and k.numel():
        most = min(MAX_TOP_K, logits.shape[1])
        require(bool(((k >= 1) & (k <= most)).all()), op, f"k must lie in [1, {most}]")


@reference("npu::npu_top_k_top_p")
def npu_top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Set to −inf what falls below the k-th largest logit, then what lies in the lowest 1 − p of the
    probability.

    Values equal to the k-th largest stay. Probabilities are summed from the smallest up and at least one
    stays (torch_npu's documentation of ``npu_top_k_top_p``).
    """
    _check("npu_top_k_top_p", logits, p, k)
    ordered, order = logits.float().sort(dim=-1, stable=True)
    if k is not None and logits.numel():
        threshold = ordered.gather(-1, (logits.shape[1] - k.long()).unsqueeze(-1))
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if p is not None:
        cumulative = ordered.softmax(-1).cumsum(-1)
        drop = cumulative <= 1 - p.float().unsqueeze(-1)
        drop[:, -1:] = False
        ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, order, ordered).to(logits.dtype)
