"""Where multi-head latent attention keeps a token's rotary part, and how the operators see both caches.

The fused operators read latents (512 elements of a token) and rotary parts (64) from two contiguous paged
tensors. vLLM's own page holds both of a token side by side, which they cannot read, and no page of the two
sizes one after the other can be seen as two contiguous tensors. So the rotary parts are a cache layer of their
own beside the latents', as vLLM does it for layers with several caches: same blocks, same tables, a region of
memory for each. A block is then one page in each of the two, and whatever moves blocks moves both.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from npufleet.kernels.ops.mla import PAGE_TOKENS, ROPE_SIZE

LAYOUTS = (KVCacheLayout.LBHNC,)
"""vLLM's layout that gives each layer a region of its own, so that a layer's pages follow one another."""


def latent_spec(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` of vLLM's MLA layer (latent and rotary part) without the rotary part."""
    size = spec.head_size - ROPE_SIZE
    return replace(spec, state_content_bytes=size * get_dtype_size(spec.dtype))


def pages(cache: torch.Tensor, width: int) -> torch.Tensor:
    """``cache`` [blocks, 128, width] as bound by vLLM, once it is known to be contiguous.

    :raises ValueError: pages of another form.
    """
    if cache.shape[1:] != (PAGE_TOKENS, width) or not cache.is_contiguous():
        raise ValueError(
            f"a cache of shape {tuple(cache.shape)} and strides {cache.stride()} is not one of contiguous "
            f"pages of {PAGE_TOKENS} tokens and {width} elements; use the KV cache layout "
            + " or ".join(x.name for x in LAYOUTS)
        )
    return cache


@dataclass(kw_only=True)
class RopeCacheMetadata(AttentionMetadata):
    """What a step says about the rotary cache: the same slots as the latents'."""

    slot_mapping: torch.Tensor
    """int64 [tokens]; −1 is padding."""


class RopeCacheBuilder(AttentionMetadataBuilder[RopeCacheMetadata]):
    """Prepares nothing: the latents' layer attends."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RopeCacheMetadata:
        """The step's slots."""
        return RopeCacheMetadata(slot_mapping=common_attn_metadata.slot_mapping)


class RopeCacheBackend(AttentionBackend):
    """Names the rotary cache's classes to vLLM's runner."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry."""
        return "NPU_MLA_ROPE"

    @staticmethod
    def get_impl_cls() -> Any:
        """:raises NotImplementedError: always; the layer is a cache."""
        raise NotImplementedError("a cache of rotary parts does not attend")

    @staticmethod
    def get_builder_cls() -> type[RopeCacheBuilder]:
        """The class that prepares each step."""
        return RopeCacheBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Tokens per block, as of the latents."""
        return [PAGE_TOKENS]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes: its layers belong to MLA layers."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts whose pages are contiguous."""
        return LAYOUTS


class RopeCache(nn.Module, AttentionLayerBase):
    """The rotary parts of one MLA layer: a cache layer that vLLM allocates and binds."""

    def __init__(self, prefix: str, cache_dtype: str) -> None:
        """:param prefix: its name among vLLM's layers.
        :param cache_dtype: vLLM's name of the cache's dtype, such as ``auto``.
        :raises ValueError: the name is taken.
        """
        super().__init__()
        self.layer_name = prefix
        self.cache_dtype = cache_dtype
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers are named {prefix}")
        layers[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's view [blocks, 1, 128, 64], the form in which connectors find a layer's cache."""
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The classes above."""
        return RopeCacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One vector of 64 elements per token."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=ROPE_SIZE,
            dtype=kv_cache_dtype_str_to_dtype(self.cache_dtype, vllm_config.model_config),
            cache_dtype_str=self.cache_dtype,
        )
