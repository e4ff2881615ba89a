"""The KV page layout: page bytes ↔ token positions, for every placement of a layer's pages."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from npufleet.plugin.attention.layout import (
    SUPPORTED_LAYOUTS,
    half_page_spec,
    paged_kv,
    scale_block_table,
    scale_slots,
)

BLOCKS, BLOCK, HEADS, HEAD = 5, 128, 2, 16


def spec(**changes: object) -> FullAttentionSpec:
    fields = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": torch.bfloat16,
    } | changes
    return half_page_spec(FullAttentionSpec(**fields))


def views(
    layout: KVCacheLayout, layers: int, kind: FullAttentionSpec, kernel_block: int | None = None
) -> list[torch.Tensor]:
    """vLLM's own views of ``layers`` layers over one pool of bytes, placed as ``layout`` says."""
    page = -(-kind.page_size_bytes // kind.get_block_stride_alignment()) * kind.get_block_stride_alignment()
    outer = layout.is_block_outermost
    placed = KVCacheTensor(
        size=BLOCKS * layers * page,
        layers=[f"layer.{i}" for i in range(layers)],
        layer_stride=page if outer else page * BLOCKS,
        block_stride=page * layers if outer else page,
    )
    pool = torch.zeros(placed.size, dtype=torch.int8)
    return create_kv_cache_views(pool, kind, BLOCKS, layout, placed, kernel_block_size=kernel_block)


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_token_lies_at_its_slot_in_the_page(layout: KVCacheLayout, layers: int) -> None:
    caches = views(layout, layers, spec())
    pages = [paged_kv(cache, HEADS) for cache in caches]
    assert {p.step for p in pages} == {2 * layers if layout.is_block_outermost else 2}
    step = pages[0].step
    slots = torch.tensor([0, BLOCK - 1, 3 * BLOCK + 7, BLOCKS * BLOCK - 1, -1])
    scaled = scale_slots(slots, step, BLOCK, torch.empty(len(slots), dtype=torch.int32))
    assert scaled[-1] == -1
    for i, (cache, page) in enumerate(zip(caches, pages, strict=True)):
        for slot, where in zip(slots[:-1].tolist(), scaled[:-1].tolist(), strict=True):
            key = torch.full((HEADS, HEAD), float(i + 1), dtype=torch.bfloat16)
            key += torch.arange(HEADS).unsqueeze(1)
            page.key_cache.flatten(0, 1)[where] = key
            page.value_cache.flatten(0, 1)[where] = -key
            block, offset = divmod(slot, BLOCK)
            assert torch.equal(cache[block, 0, offset], key.flatten()), "vLLM's view shows K in head slot 0"
            assert torch.equal(cache[block, 1, offset], -key.flatten()), "and V in head slot 1"
    for i, cache in enumerate(caches):  # nothing was written into another layer's pages
        used = cache[cache != 0]
        assert (
            used.numel() == 4 * 2 * HEADS * HEAD
            and used.abs().min() >= i + 1
            and used.abs().max() <= i + HEADS
        )


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS, ids=lambda x: x.name)
def test_both_caches_are_contiguous_and_cover_every_block(layout: KVCacheLayout) -> None:
    (cache,) = views(layout, 1, spec())
    page = paged_kv(cache, HEADS)
    for half in (page.key_cache, page.value_cache):
        assert half.is_contiguous() and half.shape == ((BLOCKS - 1) * page.step + 1, BLOCK, HEADS, HEAD)
    assert page.value_cache.data_ptr() - page.key_cache.data_ptr() == BLOCK * HEADS * HEAD * 2
    table = torch.arange(BLOCKS, dtype=torch.int32).view(1, -1)
    scaled = scale_block_table(table, page.step, torch.empty_like(table))
    for block, where in zip(range(BLOCKS), scaled[0].tolist(), strict=True):
        assert page.key_cache[where].data_ptr() == cache[block, 0].data_ptr()
        assert page.value_cache[where].data_ptr() == cache[block, 1].data_ptr()


def test_a_padded_page_is_padded_to_whole_half_pages() -> None:
    half = BLOCK * HEADS * HEAD * 2
    kind = spec(page_size_padded=2 * half + 64)
    (cache,) = views(KVCacheLayout.LBHNC, 1, kind)
    assert paged_kv(cache, HEADS).step == 3


def test_a_large_block_is_split_into_pages_of_the_same_form() -> None:
    (cache,) = views(KVCacheLayout.LBHNC, 1, spec(block_size=3 * BLOCK), kernel_block=BLOCK)
    page = paged_kv(cache, HEADS)
    assert cache.shape[0] == 3 * BLOCKS and (page.step, page.block_size) == (2, BLOCK)


def test_pages_of_another_order_are_refused() -> None:
    (cache,) = views(KVCacheLayout.LBNHC, 1, spec())
    with pytest.raises(ValueError, match="LBHNC"):
        paged_kv(cache, HEADS)


def test_pages_at_odd_distances_are_refused() -> None:
    raw = torch.zeros(1 << 20, dtype=torch.bfloat16)
    width = HEADS * HEAD
    cache = raw.as_strided((4, 2, BLOCK, width), (2 * BLOCK * width + 8, BLOCK * width, width, 1))
    with pytest.raises(ValueError, match="whole number"):
        paged_kv(cache, HEADS)


def test_value_heads_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="8 wide"):
        spec(head_size_v=8)


def test_slots_that_do_not_fit_in_32_bits_are_refused() -> None:
    pool = torch.zeros(1, dtype=torch.bfloat16, device="meta")
    blocks, width = 1 << 24, 16
    cache = pool.as_strided((blocks, 2, BLOCK, width), (2 * BLOCK * width, BLOCK * width, width, 1))
    with pytest.raises(ValueError, match="32-bit"):
        paged_kv(cache, 1)
