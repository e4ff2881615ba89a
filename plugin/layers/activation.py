"""Gated activations through the fused operators."""

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from npufleet.kernels.ops import activation as ops


class NPUSiluAndMul(SiluAndMul):
    """SwiGLU."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[..., :d]) · x[..., d:] for ``x`` [..., 2d]."""
        return ops.silu_and_mul(x)


class NPUGeluAndMul(GeluAndMul):
    """GeGLU, exact or with the tanh approximation."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x[..., :d]) · x[..., d:] for ``x`` [..., 2d]."""
        return ops.gelu_and_mul(x, self.approximate)


LAYERS: dict[str, type[CustomOp]] = {"SiluAndMul": NPUSiluAndMul, "GeluAndMul": NPUGeluAndMul}
"""Name of vLLM's class → its replacement."""
