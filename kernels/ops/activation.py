"""Gated activations: the last dimension of x [..., 2d] holds the gate, then the value; the result is [...,
d].
"""

import torch
import torch.nn.functional as F
import torch_npu

GELU_MUL_LIMIT = 1024  # elements of the last dimension that npu_gelu_mul takes at most


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · value (SwiGLU, Shazeer 2020), for x [..., 2d] in fp32, fp16 or bf16."""
    return torch_npu.npu_swiglu(x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) · value (GeGLU, Shazeer 2020), for x [..., 2d]; ``approximate`` is ``none`` (exact) or
    ``tanh``.

    :raises ValueError: another ``approximate``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}, allowed are 'none' and 'tanh'")
    if x.dim() >= 2 and x.shape[-1] <= GELU_MUL_LIMIT and x.shape[-1] % 32 == 0:
        return torch_npu.npu_gelu_mul(x, approximate=approximate)
    gate, value = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * value
