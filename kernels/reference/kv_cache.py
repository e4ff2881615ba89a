"""References of the writes of new keys and values into the paged cache.

Both operators take key and value ``[T, kv_heads, head]``, contiguous caches ``[blocks, block, kv_heads,
head]`` of the same dtype and int32 slots ``[T]`` (slot = block · block_size + offset).
"""

import torch

from .checks import require_contiguous, require_dtype, wrong
from .registry import reference

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


def _check_side(op: str, name: str, x: torch.Tensor, cache: torch.Tensor) -> None:
    require_dtype(op, name, x, CACHE_DTYPES)
    if cache.dtype != x.dtype:
        raise wrong(op, f"{name}_cache is {cache.dtype}, {name} is {x.dtype}; they must be equal")
    if x.dim() != 3:
        raise wrong(op, f"{name} {tuple(x.shape)} must be [tokens, heads, head]")
    if cache.dim() != 4 or cache.shape[2:] != x.shape[1:]:
        shapes = f"{name}_cache {tuple(cache.shape)} and {name} {tuple(x.shape)}"
        raise wrong(op, f"{shapes} must be [blocks, block, heads, head] and [tokens, heads, head]")
    if cache.shape[1] % 16:
        raise wrong(op, f"the block size is {cache.shape[1]}, it must be a multiple of 16")


def _write(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    _check_side(op, "key", key, key_cache)
    _check_side(op, "value", value, value_cache)
    if key.shape[:2] != value.shape[:2]:
        raise wrong(op, f"key {tuple(key.shape)} and value {tuple(value.shape)} differ")
    if key_cache.shape[:2] != value_cache.shape[:2]:
        raise wrong(op, "key_cache and value_cache differ in blocks")
    require_dtype(op, "slots", slots, (torch.int32,))
    if slots.dim() != 1 or slots.shape[0] != key.shape[0]:
        raise wrong(op, f"slots {tuple(slots.shape)} must be [{key.shape[0]}]")
    require_contiguous(op, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots)
    if not slots.numel():
        return
    lowest, highest = (int(x) for x in torch.aminmax(slots))
    count = key_cache.shape[0] * key_cache.shape[1]
    if lowest < -1 or highest >= count:
        raise wrong(op, f"a slot lies outside −1 … {count - 1}")
    if lowest < 0:
        keep = slots >= 0
        key, value, slots = key[keep], value[keep], slots[keep]
    index = slots.long()
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, index, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, index, value)


@reference("atb::_npu_reshape_and_cache")
def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Copy each token's key and value to its slot; a token whose slot is −1 (padding) is skipped."""
    _write("_npu_reshape_and_cache", key, value, key_cache, value_cache, slot_indices)


@reference("npu::npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Copy each token's key and value to its slot, in the plain layout (``cache_mode="Norm"``) without
    compression.
    """
    op = "npu_scatter_pa_kv_cache"
    optional = {
        "compress_lens": compress_lens,
        "compress_seq_offsets": compress_seq_offsets,
        "seq_lens": seq_lens,
    }
    for name, given in optional.items():
        if given is not None:
            raise NotImplementedError(f"{op}: no reference for {name}")
    if cache_mode not in ("Norm", None):
        raise NotImplementedError(f"{op}: no reference for cache_mode={cache_mode!r} (only 'Norm')")
    _write(op, key, value, key_cache, value_cache, slot_mapping)
