"""Rotary embeddings through the fused operators.

vLLM's classes differ in how they fill ``cos_sin_cache`` (linear, NTK, Llama 3, YaRN … scaling) and share one
way of applying it; so one mixin serves them all, and a class per class of vLLM keeps their constructors.
"""

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.rotary_embedding import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding

from npufleet.kernels.ops import rope as ops

Rotated = tuple[torch.Tensor, torch.Tensor | None]


class PlainRotaryMixin:
    """Applies the cached cosines and sines at one position per token."""

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Rotated:
        """Rotate ``query`` [T, heads · head] and ``key`` [T, kv_heads · head] at ``positions`` [T]; heads may
        be a dimension of their own.
        """
        assert isinstance(self, RotaryEmbedding)
        tokens = positions.numel()
        cache, width = self._match_cos_sin_cache_dtype(query), self.rotary_dim
        if width < self.head_size and not self.is_neox_style:
            cache, width = self._over_whole_head(cache), self.head_size
        rotated, turned = ops.rotary_embedding(
            positions.flatten(),
            query.reshape(tokens, -1),
            None if key is None else key.reshape(tokens, -1),
            cache,
            self.head_size,
            width,
            self.is_neox_style,
        )
        return rotated.view(query.shape), None if key is None or turned is None else turned.view(key.shape)

    def _over_whole_head(self, cache: torch.Tensor) -> torch.Tensor:
        """``cache`` [positions, rotary_dim] widened to the head by pairs that turn by nothing: one fused operator
        instead of a dozen. Only where pairs are neighbours; halves would pair up otherwise.

        Made at the first step, which measures memory; layers share it as they share their rotary embedding.
        """
        assert isinstance(self, RotaryEmbedding)
        known = getattr(self, "_whole", None)
        if known is None or known.dtype != cache.dtype or known.device != cache.device:
            cos, sin = cache.chunk(2, dim=-1)
            rest = (cache.shape[0], (self.head_size - self.rotary_dim) // 2)
            known = torch.cat((cos, cache.new_ones(rest), sin, cache.new_zeros(rest)), dim=-1)
            self._whole = known
        return known


class NPUMRotaryEmbedding(MRotaryEmbedding):
    """Multimodal rotary embedding: time, height and width positions in sections of the head."""

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Rotated:
        """Rotate at ``positions`` [3, T] by sections, or at ``positions`` [T] like the plain embedding."""
        cache = self._match_cos_sin_cache_dtype(query)
        if positions.ndim == 1:
            return ops.rotary_embedding(
                positions, query, key, cache, self.head_size, self.rotary_dim, self.is_neox_style
            )
        assert key is not None and self.mrope_section is not None
        return ops.mrope(
            positions,
            query,
            key,
            cache,
            self.head_size,
            self.rotary_dim,
            self.mrope_section,
            self.is_neox_style,
            self.mrope_interleaved,
        )


_PLAIN = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
)

LAYERS: dict[str, type[CustomOp]] = {
    **{cls.__name__: type(f"NPU{cls.__name__}", (PlainRotaryMixin, cls), {}) for cls in _PLAIN},
    "MRotaryEmbedding": NPUMRotaryEmbedding,
}
"""Name of vLLM's class → its replacement, a subclass (Python runs the constructor of the class asked for)."""
