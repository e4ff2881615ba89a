"""RMS norms through the fused operators."""

from typing import TypeAlias

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from npufleet.kernels.ops import norm as ops

Normed: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class NPURMSNorm(RMSNorm):
    """RMSNorm, with the residual added in the same operator where there is one."""

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """The norm of ``x`` [..., d], or ``(norm of x + residual, x + residual)``.

        A norm over a part of the width, or whose weight is of another dtype, is left to vLLM's formula.
        """
        weight = self.weight
        if self.variance_size_override is not None or weight.dtype != x.dtype or weight.device != x.device:
            return self.forward_native(x, residual)
        if residual is None:
            return ops.rms_norm(x, weight, self.variance_epsilon)
        return ops.add_rms_norm(x, residual, weight, self.variance_epsilon)


class NPUGemmaRMSNorm(GemmaRMSNorm):
    """RMSNorm whose weight is stored as its distance from 1."""

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """As :meth:`NPURMSNorm.forward_oot`."""
        if self.weight.dtype != x.dtype:
            return self.forward_native(x, residual)
        if residual is None:
            return ops.gemma_rms_norm(x, self.weight, self.variance_epsilon)
        return ops.gemma_add_rms_norm(x, residual, self.weight, self.variance_epsilon)


LAYERS: dict[str, type[CustomOp]] = {"RMSNorm": NPURMSNorm, "GemmaRMSNorm": NPUGemmaRMSNorm}
"""Name of vLLM's class → its replacement."""
