"""The backend of multi-head latent attention (DeepSeek V2, V3 and R1, Kimi K2 and their kin)."""

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    AttentionType,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from npufleet.kernels.ops.attention import merge_attention
from npufleet.kernels.ops.kv_cache import write_kv
from npufleet.kernels.ops.mla import (
    KEY_SIZE,
    LATENT_SIZE,
    PAGE_TOKENS,
    ROPE_SIZE,
    VALUE_SIZE,
    LatentAttentionCall,
    gather_latents,
    padded_heads,
)

from .capture import recorder
from .context_parallel import ContextGroup, without_empty
from .mla_cache import LAYOUTS, RopeCache, latent_spec, pages
from .mla_metadata import LatentMetadata, LatentMetadataBuilder

SIZES = {
    "kv_lora_rank": LATENT_SIZE,
    "qk_rope_head_dim": ROPE_SIZE,
    "qk_nope_head_dim": KEY_SIZE - ROPE_SIZE,
    "v_head_dim": VALUE_SIZE,
}
"""A model's sizes that the fused operators take, by their names in its configuration."""


def check_sizes(given: dict[str, Any]) -> None:
    """:raises ValueError: a model whose latents or heads have other sizes than the operators take."""
    wrong = {name: given.get(name) for name, size in SIZES.items() if given.get(name) != size}
    if wrong:
        wanted = ", ".join(f"{name} {size}" for name, size in SIZES.items())
        raise ValueError(
            f"multi-head latent attention with {', '.join(f'{k} {v}' for k, v in wrong.items())} is not "
            f"supported on NPU, whose operators take {wanted}; set VLLM_MLA_DISABLE=1 to run the model with "
            "plain attention"
        )


def check_model(sizes: dict[str, Any], heads: int, dtype: torch.dtype) -> None:
    """What can be told before any layer is made.

    :param heads: query heads of a tensor-parallel rank, times decode_context_parallel_size.
    :raises ValueError: sizes, heads or a dtype that the operators do not take.
    """
    check_sizes(sizes)
    padded_heads(heads)
    if dtype not in AscendMLABackend.supported_dtypes:
        raise ValueError(
            f"multi-head latent attention on NPU does not take {str(dtype).removeprefix('torch.')}, whose "
            "operator for prefill is bfloat16 alone; use dtype bfloat16, or set VLLM_MLA_DISABLE=1 to run the "
            "model with plain attention"
        )


class AscendMLABackend(AttentionBackend):
    """Names the classes of latent attention to vLLM and says what they support."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry."""
        return "NPU_MLA"

    @staticmethod
    def get_impl_cls() -> type["AscendMLAImpl"]:
        """The class that computes attention."""
        return AscendMLAImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """The class that prepares each step."""
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Tokens per block that the operator takes; larger blocks of the manager are split into these."""
        return [PAGE_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Elements that vLLM counts per token: latent and rotary part."""
        return [LATENT_SIZE + ROPE_SIZE]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts whose pages are contiguous, see :mod:`.mla_cache`."""
        return LAYOUTS

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages of latents alone: the rotary parts have a cache of their own."""
        return latent_spec(spec)


class AscendMLAImpl(MLAAttentionImpl[LatentMetadata]):
    """Attention of one layer: decode over latents, prefill over expanded heads."""

    supports_pcp = False
    supports_dcp = True
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        """:raises ValueError: sizes, heads or features that the operators do not take."""
        features = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap on attention logits": logits_soft_cap,
            "a cache shared between layers": kv_sharing_target_layer_name,
            "a sparse indexer": indexer,
            f"attention type {attn_type}": None if attn_type == AttentionType.DECODER else attn_type,
        }
        named = [name for name, value in features.items() if value is not None]
        if named:
            raise ValueError(f"multi-head latent attention with {', '.join(named)} is not supported on NPU")
        check_sizes(
            {
                "kv_lora_rank": kv_lora_rank,
                "qk_rope_head_dim": qk_rope_head_dim,
                "qk_nope_head_dim": qk_nope_head_dim,
                "v_head_dim": v_head_dim,
            }
        )
        self.num_heads = num_heads
        self.padded_heads = padded_heads(num_heads * self.dcp_world_size)
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_b_proj = kv_b_proj
        self.q_pad_num_heads = q_pad_num_heads
        self.rope_cache: RopeCache | None = None
        self.context = ContextGroup.of_layer()
        self.key_up: torch.Tensor | None = None
        self.value_up: torch.Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Lay out the two up-projections for the absorbed form: of keys [heads, 128, 512], of values
        [heads, 512, 128], contiguous. Weights that are loaded again go to the same memory, which a captured
        graph reads.
        """
        key, value = split_kv_b_proj(
            self.kv_b_proj, act_dtype, LATENT_SIZE, self.num_heads, KEY_SIZE - ROPE_SIZE, VALUE_SIZE
        )
        key, value = key.permute(1, 2, 0), value.transpose(0, 1)
        if self.key_up is None or self.value_up is None:
            self.key_up, self.value_up = key.contiguous(), value.contiguous()
        else:
            self.key_up.copy_(key)
            self.value_up.copy_(value)

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(latents [blocks, 128, 512], rotary parts [blocks, 128, 64]), both contiguous."""
        assert self.rope_cache is not None, "the layer around this one did not make the rotary cache"
        return pages(kv_cache, LATENT_SIZE), pages(self.rope_cache.kv_cache.squeeze(1), ROPE_SIZE)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write latents [T, 512] and rotary parts [T, 1, 64] that are normed and rotated already."""
        latents, ropes = self.caches(kv_cache)
        write_kv(
            kv_c_normed.unsqueeze(1),
            k_pe.view(-1, 1, ROPE_SIZE),
            latents.unsqueeze(2),
            ropes.unsqueeze(2),
            slot_mapping.to(torch.int32),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode: absorbed queries ([T, heads, 512], [T, heads, 64]) to latents [T, heads, 512].

        With decode context parallel the heads are those of all its ranks, attention is over the tokens that this
        rank has, and its log-sum-exp, float32 [T, heads], comes with it; else None.
        """
        parts = q if isinstance(q, tuple) else q.split([LATENT_SIZE, ROPE_SIZE], dim=-1)
        heads = parts[0].shape[1]
        query, rope = (self._pad(part) for part in parts)
        latents, ropes = self.caches(kv_c_and_k_pe_cache)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
        call = LatentAttentionCall(
            query=query,
            query_rope=rope,
            latent_cache=latents,
            rope_cache=ropes,
            block_table=attn_metadata.block_table,
            out=torch.empty_like(query),
            scale=self.scale,
            lse=lse,
        )
        step = recorder()
        launch = call.launch if step is None else partial(step.attend, call)
        launch(attn_metadata.query_ends, attn_metadata.kv_lens)
        if lse is None:
            return call.out[:, :heads], None
        assert attn_metadata.empty is not None
        return call.out[:, :heads], without_empty(lse[:, :heads, 0], attn_metadata.empty)

    def decode(
        self,
        query: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        step: LatentMetadata,
        layer: Any,
    ) -> torch.Tensor:
        """Absorbed queries [T, heads, 512] and [T, heads, 64] of this rank to latents [T, heads, 512], whichever
        ranks have the tokens.
        """
        if self.context is None:
            return self.forward_mqa((query, rope), kv_cache, step, layer)[0]
        query, rope = self.context.gather_heads(query, rope)
        part, lse = self.forward_mqa((query, rope), kv_cache, step, layer)
        assert lse is not None
        return self.context.combine(part, lse)[0]

    def _pad(self, query: torch.Tensor) -> torch.Tensor:
        """``query`` [T, heads, d] contiguous, with heads of zeros up to a number that the operator takes."""
        missing = self.padded_heads - query.shape[1]
        return torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing else query.contiguous()

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill: q [T, heads, 192] over the new tokens' latents [T, 512] and rotary parts, and over the
        earlier tokens in the cache. Fills ``output`` [T, heads · 128].
        """
        assert output_scale is None and attn_metadata.new is not None
        prefill = attn_metadata.new
        key, value = self._expand(kv_c_normed, k_pe)
        if not prefill.chunks:
            alone = prefill.backend.run_prefill_new_tokens(q, key, value, return_softmax_lse=False)
            output.copy_(alone.view(output.shape))
            return
        out, lse = prefill.backend.run_prefill_new_tokens(q, key, value, return_softmax_lse=True)
        latents, ropes = self.caches(kv_c_and_k_pe_cache)
        for chunk in prefill.chunks:
            earlier = gather_latents(
                latents, ropes, chunk.block_table, chunk.lengths, chunk.starts, chunk.rows
            )
            if self.context is not None:
                assert chunk.places is not None
                first, second = (self.context.gather_tokens(rows, chunk.places) for rows in earlier)
                earlier = first, second
            key, value = self._expand(*earlier)
            part, part_lse = prefill.backend.run_prefill_context_chunk(chunk, q[chunk.tokens], key, value)
            merged, merged_lse = merge_attention([out[chunk.tokens], part], [lse[chunk.tokens], part_lse])
            out[chunk.tokens], lse[chunk.tokens] = merged, merged_lse
        output.copy_(out.view(output.shape))

    def _expand(self, latents: torch.Tensor, ropes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, heads, 192] and values [S, heads, 128] of latents [S, 512] and rotary parts [S, 64]."""
        both = self.kv_b_proj(latents)[0].view(latents.shape[0], self.num_heads, -1)
        nope = KEY_SIZE - ROPE_SIZE
        key = both.new_empty(*both.shape[:2], KEY_SIZE)
        key[..., :nope] = both[..., :nope]
        key[..., nope:] = ropes.view(-1, 1, ROPE_SIZE)
        return key, both[..., nope:].contiguous()
