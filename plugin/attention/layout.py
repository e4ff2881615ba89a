"""Where the bytes of a KV cache block are.

vLLM gives every layer one page per block. The fused attention operator of the NPU reads keys and values from
two contiguous tensors [blocks, block, kv_heads, head]. Both are satisfied when a page is a half page of keys
followed by a half page of values:

    page of block b:  | K: block_size × kv_heads × head | V: block_size × kv_heads × head | padding |

A block stays one run of bytes, so whatever moves blocks (connectors, offloading, zeroing) moves whole pages.
To the operators the same memory is *half pages*: a contiguous tensor that starts at the first K, and another
that starts one half page later. In both, block b has the number ``b · step``, where ``step`` is the distance
of two pages of a layer in half pages: 2 for pages that follow one another, more with padding or with other
layers' pages in between.
"""

from dataclasses import dataclass, replace

import torch
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

SUPPORTED_LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
"""vLLM's layouts whose pages are one run of bytes in the order head slot, token, content."""

BLOCK_SIZES = (128, 256, 384, 512)
"""Tokens per block that the fused attention operator takes when queries are longer than one token."""


def half_page_spec(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` as our pages are: two head slots, K and V, each holding all heads of a token in one content.

    vLLM's logical view of a layer, [block, head slot, token, content], is then literally true, and a padded
    page is padded to a whole number of half pages.

    :raises ValueError: the heads of V are not as wide as those of K.
    """
    if spec.head_size_v != spec.head_size:
        raise ValueError(
            f"the value heads are {spec.head_size_v} wide and the key heads {spec.head_size}; the NPU KV "
            "cache needs both alike"
        )
    content = spec.num_kv_heads * spec.head_size * get_dtype_size(spec.dtype)
    return replace(
        spec,
        num_head_slots=2,
        state_content_bytes=content,
        block_stride_alignment=spec.block_size * content,
    )


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """One layer's cache as the operators take it."""

    key_cache: torch.Tensor
    """[half pages, block_size, kv_heads, head], contiguous."""
    value_cache: torch.Tensor
    """The same shape, starting one half page later."""
    step: int
    """Half pages from one block of the layer to the next."""
    block_size: int
    """Tokens per block."""


def paged_kv(cache: torch.Tensor, num_kv_heads: int) -> PagedKV:
    """The operators' view of vLLM's view ``cache`` [blocks, 2, block_size, kv_heads · head] of one layer.

    :raises ValueError: the distance of two pages is not a whole number of half pages, or the slots of the
        last block do not fit in 32 bits.
    """
    blocks, halves, block_size, width = cache.shape
    if halves != 2 or cache.stride()[1:] != (block_size * width, width, 1):
        raise ValueError(
            f"a KV page of shape {tuple(cache.shape)} and strides {cache.stride()} is not a half page of "
            "keys followed by one of values; allowed layouts are "
            + ", ".join(x.name for x in SUPPORTED_LAYOUTS)
        )
    half = cache.stride(1)
    step, rest = divmod(cache.stride(0), half)
    if rest or step < 2:
        raise ValueError(
            f"KV pages are {cache.stride(0) * cache.element_size()} bytes apart, which is not a whole "
            f"number of half pages of {half * cache.element_size()} bytes; choose a block size that gives "
            "all layers one page size"
        )
    pages = (blocks - 1) * step + 1
    if pages * block_size > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"{blocks} KV blocks of {block_size} tokens exceed the operators' 32-bit slot numbers"
        )
    heads = (pages, block_size, num_kv_heads, width // num_kv_heads)
    strides = (half, width, width // num_kv_heads, 1)
    start = cache.storage_offset()
    return PagedKV(
        key_cache=cache.as_strided(heads, strides, start),
        value_cache=cache.as_strided(heads, strides, start + half),
        step=step,
        block_size=block_size,
    )


def scale_block_table(block_table: torch.Tensor, step: int, out: torch.Tensor) -> torch.Tensor:
    """Write the half-page numbers of ``block_table`` [R, blocks] int32 to ``out`` of the same shape; returns
    it.
    """
    return torch.mul(block_table, step, out=out)


def scale_slots(slots: torch.Tensor, step: int, block_size: int, out: torch.Tensor) -> torch.Tensor:
    """Turn vLLM's slots (block · block_size + offset) into slots of the half-page tensors.

    :param slots: [T] int64 of vLLM; −1 marks padding and stays −1 (division rounds to zero for that).
    :param out: [T] int32; receives block · step · block_size + offset. Returns it.
    """
    out.copy_(slots)
    blocks = torch.div(out, block_size, rounding_mode="trunc")
    return out.add_(blocks, alpha=(step - 1) * block_size)
