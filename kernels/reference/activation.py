"""References of the gated activations: the last (or a given) dimension holds the gate, then the value."""

import torch
import torch.nn.functional as F

from .checks import FLOATS, require, require_dtype, wrong
from .registry import reference

GELU_MUL_LAST_DIMENSION = 1024  # what aclnnGeluMul takes at most


def _halves(op: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    require_dtype(op, "x", x, FLOATS)
    if not -x.dim() <= dim < x.dim():
        raise wrong(op, f"dim is {dim}, x has {x.dim()} dimensions")
    if x.shape[dim] % 2:
        raise wrong(op, f"dimension {dim} of x {tuple(x.shape)} must be even")
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half), x.narrow(dim, half, half)


@reference("npu::npu_swiglu")
def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(a) · b for x = [a, b] along ``dim``."""
    gate, value = _halves("npu_swiglu", self, dim)
    return F.silu(gate).mul_(value)


@reference("npu::npu_gelu")
def npu_gelu(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """GELU, exact (``none``: with the error function) or its ``tanh`` form."""
    op = "npu_gelu"
    require_dtype(op, "x", self, FLOATS)
    require(
        approximate in ("none", "tanh"), op, f"approximate is {approximate!r}, allowed are 'none' and 'tanh'"
    )
    return F.gelu(self, approximate=approximate)


@reference("npu::npu_gelu_mul")
def npu_gelu_mul(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """gelu(a) · b for x = [a, b] along the last dimension, which may hold at most 1,024 elements."""
    op = "npu_gelu_mul"
    require(2 <= self.dim() <= 8, op, f"x has {self.dim()} dimensions, allowed are 2 to 8")
    require(
        self.shape[-1] <= GELU_MUL_LAST_DIMENSION,
        op,
        f"the last dimension is {self.shape[-1]}, at most {GELU_MUL_LAST_DIMENSION} is allowed",
    )
    require(
        approximate in ("none", "tanh"), op, f"approximate is {approximate!r}, allowed are 'none' and 'tanh'"
    )
    gate, value = _halves(op, self, -1)
    return F.gelu(gate, approximate=approximate).mul_(value)


@reference("npu::npu_geglu")
def npu_geglu(
    self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """gelu(gate) · value, and gelu(gate). ``approximate`` 0 is exact, 1 is tanh; the gate is the left half if
    told.
    """
    op = "npu_geglu"
    require(approximate in (0, 1), op, f"approximate is {approximate}, allowed are 0 (none) and 1 (tanh)")
    left, right = _halves(op, self, dim)
    gate, value = (left, right) if activate_left else (right, left)
    activated = F.gelu(gate, approximate="tanh" if approximate else "none")
    return activated * value, activated
