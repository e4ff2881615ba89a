"""Prefill of multi-head latent attention: expanded heads, new tokens causally, earlier ones without a mask."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from npufleet.kernels.ops.mla import KEY_SIZE, ROPE_SIZE, VALUE_SIZE, expanded_attention


class NPUMLAPrefillBackend(MLAPrefillBackend):
    """The fused operator over packed heads. Lengths come from the step's :class:`.mla_metadata.LatentPrefill`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(
            qk_nope_head_dim=KEY_SIZE - ROPE_SIZE, qk_rope_head_dim=ROPE_SIZE, v_head_dim=VALUE_SIZE
        )
    ]

    @staticmethod
    def get_name() -> str:
        """The name in log lines."""
        return "NPU_MLA_PREFILL"

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Causal attention of all new tokens q [T, heads, 192] among themselves.

        Returns [T, heads, 128], with its log-sum-exp float32 [T, heads] if wanted; ``out`` is not used.
        """
        assert output_scale is None
        ends: list[int] = self._prefill_metadata.query_ends  # type: ignore[attr-defined]
        result, lse = expanded_attention(
            q, k, v, ends, ends, causal=True, scale=self.scale, want_lse=return_softmax_lse
        )
        return (result, lse) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the tokens of a :class:`.mla_metadata.ContextChunk` over its earlier tokens.

        Returns as :meth:`run_prefill_new_tokens` with the log-sum-exp.
        """
        result, lse = expanded_attention(
            q, k, v, chunk.query_ends, chunk.kv_ends, causal=False, scale=self.scale, want_lse=True
        )
        assert lse is not None
        return result, lse
