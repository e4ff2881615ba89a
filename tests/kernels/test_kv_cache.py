import pytest
import torch

from npufleet.kernels.ops import kv_cache

from .formulas import DTYPES


def make(dtype: torch.dtype, tokens: int, blocks: int = 5, block: int = 16, heads: int = 3, head: int = 8):
    key, value = torch.randn(tokens, heads, head).to(dtype), torch.randn(tokens, heads, head).to(dtype)
    caches = torch.randn(2, blocks, block, heads, head).to(dtype)
    return key, value, caches[0].clone(), caches[1].clone()


def written(cache: torch.Tensor, new: torch.Tensor, slots: list[int]) -> torch.Tensor:
    result, block = cache.clone(), cache.shape[1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            result[slot // block, slot % block] = new[token]
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[0, 15, 16, 79], [7], [], [-1, 3, -1], [-1, -1]])
def test_tokens_land_in_their_slots_and_nowhere_else(device, dtype, slots):
    key, value, key_cache, value_cache = make(dtype, len(slots))
    on_device = key_cache.to(device), value_cache.to(device)
    index = torch.tensor(slots, dtype=torch.int32, device=device)
    kv_cache.write_kv(key.to(device), value.to(device), *on_device, index)
    assert torch.equal(on_device[0].cpu(), written(key_cache, key, slots))
    assert torch.equal(on_device[1].cpu(), written(value_cache, value, slots))


def test_parts_of_a_fused_projection_are_taken(device):
    both = torch.randn(4, 2 * 24).to(device)
    key, value = (x.view(4, 3, 8) for x in both.split(24, dim=-1))
    _, _, key_cache, value_cache = make(torch.float32, 0)
    caches = key_cache.to(device), value_cache.to(device)
    slots = [5, 4, 40, 41]
    kv_cache.write_kv(key, value, *caches, torch.tensor(slots, dtype=torch.int32, device=device))
    assert torch.equal(caches[0].cpu(), written(key_cache, key.cpu(), slots))
    assert torch.equal(caches[1].cpu(), written(value_cache, value.cpu(), slots))


def test_keys_and_values_in_half_pages_of_one_pool(device):
    """K and V of a block side by side: two contiguous views of one pool, V half a page later, ids doubled."""
    blocks, block, heads, head = 4, 16, 2, 8
    pool = torch.zeros(2 * blocks, block, heads, head, device=device)
    key, value = torch.randn(3, heads, head), torch.randn(3, heads, head)
    slots = [0, 17, 63]
    doubled = torch.tensor([s // block * 2 * block + s % block for s in slots], dtype=torch.int32)
    kv_cache.write_kv(key.to(device), value.to(device), pool[:-1], pool[1:], doubled.to(device))
    pages = pool.cpu().view(blocks, 2, block, heads, head)
    for token, slot in enumerate(slots):
        assert torch.equal(pages[slot // block, 0, slot % block], key[token])
        assert torch.equal(pages[slot // block, 1, slot % block], value[token])
    assert int(pages.abs().sum(-1).ne(0).sum()) == 2 * len(slots) * heads
