"""Writing new keys and values into the paged KV cache."""

import torch
import torch_npu


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Copy each token's key and value to its slot of the cache, in place.

    :param key: [T, kv_heads, head]; made contiguous if it is not (as a part of a fused projection it is
        not).
    :param value: [T, kv_heads, value_head], like key.
    :param key_cache: [blocks, block, kv_heads, head], contiguous, of the dtype of key.
    :param value_cache: [blocks, block, kv_heads, value_head], likewise.
    :param slots: int32 [T], block · block_size + offset; −1 skips the token (padding), no slot may come
        twice.
    """
    torch_npu.npu_scatter_pa_kv_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slots, cache_mode="Norm"
    )
