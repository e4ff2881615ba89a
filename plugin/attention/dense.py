"""The dense attention backend: paged multi-head, grouped-query and sliding-window attention."""

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from npufleet.kernels.ops.attention import PagedAttentionCall, varlen_attention
from npufleet.kernels.ops.kv_cache import write_kv

from .capture import recorder
from .context_parallel import ContextGroup
from .dense_context import SpreadAttention, SpreadStep
from .layout import BLOCK_SIZES, SUPPORTED_LAYOUTS, PagedKV, half_page_spec, paged_kv
from .metadata import DenseMetadata, DenseMetadataBuilder

MAX_HEAD_SIZE = 512


class AscendAttentionBackend(AttentionBackend):
    """Names the classes of dense attention to vLLM and says what they support."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry."""
        return "NPU_DENSE"

    @staticmethod
    def get_impl_cls() -> type["AscendAttentionImpl"]:
        """The class that computes attention."""
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DenseMetadataBuilder]:
        """The class that prepares each step."""
        return DenseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Tokens per block that the operator takes; larger blocks of the manager are split into these."""
        return list(BLOCK_SIZES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """The operator takes heads that are a multiple of 16 elements, at most 512."""
        return head_size % 16 == 0 and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder layers, and layers of encoder-only models."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts whose pages are one run of bytes, see :mod:`.layout`."""
        return SUPPORTED_LAYOUTS

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages as half pages of keys and of values, see :mod:`.layout`."""
        return half_page_spec(spec)


def _attend(call: PagedAttentionCall, query_ends: list[int], kv_lens: list[int]) -> None:
    """Launch ``call``, or put it into the step that is being captured."""
    step = recorder()
    launch = call.launch if step is None else partial(step.attend, call)
    launch(query_ends, kv_lens)


class AscendAttentionImpl(AttentionImpl[DenseMetadata]):
    """Attention of one layer: writes the step's keys and values into the cache and attends over it."""

    supports_dcp = True
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        unsupported |= {"ALiBi": alibi_slopes, "a soft cap on attention logits": logits_soft_cap}
        if attn_type == AttentionType.ENCODER_ONLY and sliding_window is not None:
            unsupported["a sliding window without a causal mask"] = sliding_window
        named = [name for name, value in unsupported.items() if value is not None]
        if named:
            raise ValueError(
                f"attention with {', '.join(named)} is not supported on NPU; supported is softmax attention "
                "with a causal mask, a sliding window or no mask"
            )
        self.context = ContextGroup.of_layer()
        if self.context is not None and (
            sliding_window is not None or kv_sharing_target_layer_name is not None
        ):
            what = "a sliding window" if sliding_window is not None else "a cache shared between layers"
            raise ValueError(f"attention with {what} needs decode_context_parallel_size 1 on NPU")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.writes_cache = kv_sharing_target_layer_name is None
        self._bound: torch.Tensor | None = None
        self._pages: PagedKV | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DenseMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill ``output`` [T, heads, head] from ``query`` of that shape and ``key``/``value`` [T, kv_heads,
        head].

        Without metadata (vLLM measures its memory before there is a cache) the output is zero.
        """
        assert output_scale is None and output_block_scale is None
        if attn_metadata is None:
            return output.zero_()
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return self._attend_without_cache(query, key, value, attn_metadata, output)
        pages = self._paged(kv_cache)
        tokens = attn_metadata.num_tokens
        if tokens < output.shape[0]:
            output[tokens:].zero_()
        if self.writes_cache and key is not None:
            written = attn_metadata.slots.shape[0]
            write_kv(key[:written], value[:written], pages.key_cache, pages.value_cache, attn_metadata.slots)
        if attn_metadata.spread is not None:
            return self._attend_spread(query, key, value, pages, attn_metadata, attn_metadata.spread, output)
        call = PagedAttentionCall(
            query=query[:tokens].contiguous(),
            key_cache=pages.key_cache,
            value_cache=pages.value_cache,
            block_table=attn_metadata.block_table,
            out=output[:tokens],
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        _attend(call, attn_metadata.query_ends, attn_metadata.kv_lens)
        return output

    def _attend_spread(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: PagedKV,
        metadata: DenseMetadata,
        step: SpreadStep,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """As :meth:`forward`, with decode context parallel."""
        assert self.context is not None
        spread = SpreadAttention(group=self.context, pages=pages, scale=self.scale, attend=_attend)
        decoded, tokens = step.decodes, metadata.num_tokens
        if decoded:
            output[:decoded] = spread.decode(
                query[:decoded], metadata.query_ends, metadata.kv_lens, metadata.block_table, step.empty
            )
        if tokens > decoded:
            new = slice(decoded, tokens)
            output[new] = spread.prefill(query[new], key[new], value[new], step)
        return output

    def _attend_without_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: DenseMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention within each request without a mask, for encoder-only models."""
        n, ends = metadata.num_tokens, metadata.query_ends
        output[:n] = varlen_attention(
            query[:n],
            key[:n],
            value[:n],
            ends,
            ends,
            causal=False,
            scale=self.scale,
        )
        return output

    def _paged(self, kv_cache: torch.Tensor) -> PagedKV:
        """The operators' view of this layer's cache, made once for each cache that the runner binds."""
        if self._pages is None or self._bound is not kv_cache:
            self._pages, self._bound = paged_kv(kv_cache, self.num_kv_heads), kv_cache
        return self._pages
