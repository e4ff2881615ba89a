"""PyTorch forms of the Triton kernels that vLLM's runner launches between model steps.

vLLM lets a platform replace its Triton kernels by name; it calls a replacement with the kernel's arguments in
the kernel's order. These run on the NPU's stream and never wait for it.
"""

from collections.abc import Callable

import torch


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    kv_cache_block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_kv_cache_interleave_size: int,
    pad_id: int,
    block_size: int,
) -> None:
    """Write to ``slot_mapping`` [max_num_tokens] int64 where each token's key and value go.

    :param query_start_loc: int32 [R + 1], where each request's tokens start.
    :param positions: int64 [num_tokens], position of each token in its sequence.
    :param block_table: int32 [R or more, blocks], blocks of each request.
    :param pad_id: goes to all slots behind ``num_tokens``.

    A token's slot is its block's number times ``kv_cache_block_size`` plus its offset in the block. With decode
    context parallel a block holds ``total_cp_world_size`` times as many tokens of the sequence, of which each rank
    keeps its share (see :class:`.attention.context_parallel.Shard`); the others' have the slot ``pad_id`` here.
    ``block_size`` is Triton's tile.
    """
    ranks, interleave = total_cp_world_size, cp_kv_cache_interleave_size
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=positions.device)
    requests = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    blocks = block_table[requests, positions // (kv_cache_block_size * ranks)].to(torch.int64)
    if ranks == 1:
        slots = blocks * kv_cache_block_size + positions % kv_cache_block_size
    else:
        offsets = positions % (kv_cache_block_size * ranks)
        local = offsets // (ranks * interleave) * interleave + offsets % interleave
        slots = blocks * kv_cache_block_size + local
        slots.masked_fill_(offsets // interleave % ranks != total_cp_rank, pad_id)
    slot_mapping[:num_tokens] = slots
    slot_mapping[num_tokens:max_num_tokens].fill_(pad_id)


REPLACEMENTS: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping,
}
"""Full name of vLLM's kernel → its replacement."""
