"""From VllmEngine KV-event batches to the prefix index."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.prompt import Key, chain, namespace, pack

_ON_DEVICE = (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
_HERE = (common_pb2.KV_CACHE_LOCALITY_UNSPECIFIED, common_pb2.KV_CACHE_LOCALITY_LOCAL)
_WINDOWED = "sliding_window"
_STATE = ("mamba", "linear_attention", "gated_delta_net")  # groups that keep states, not token blocks


def apply(index: PrefixIndex, engine_id: str, batch: common_pb2.KvEventBatch) -> None:
    """Bring ``index`` up to date with what the engine says.

    Blocks in host memory, on disk or elsewhere are not what a prefix hit on the device finds; they are left out.
    """
    for event in batch.events:
        kind = event.WhichOneof("data")
        if kind == "stored":
            _stored(index, engine_id, event.stored)
        elif kind == "removed":
            removed = event.removed
            if removed.tier in _ON_DEVICE and removed.locality in _HERE:
                index.removed(engine_id, removed.block_hashes, group=removed.group_idx)
        elif kind == "cleared":
            index.cleared(engine_id)


def load_of(batch: common_pb2.KvEventBatch) -> LoadReport | None:
    """The engine's load that came with the batch, if any did."""
    if not batch.HasField("load"):
        return None
    load = batch.load
    return LoadReport(
        running=load.running_requests,
        waiting=load.waiting_requests,
        waiting_tokens=load.waiting_uncached_tokens,
        kv_usage=load.active_token_usage if load.HasField("active_token_usage") else load.token_usage,
    )


def _stored(index: PrefixIndex, engine_id: str, stored: common_pb2.KvBlocksStored) -> None:
    if stored.tier not in _ON_DEVICE or stored.locality not in _HERE or not stored.blocks:
        return
    if any(state in stored.kv_cache_spec_kind for state in _STATE):
        return
    group, parent = stored.group_idx, namespace(stored.lora_name, stored.cache_salt)
    if stored.HasField("parent_block_hash"):
        known = index.parent_key(engine_id, group, stored.parent_block_hash)
        if known is None:
            index.orphans += len(stored.blocks)
            return
        parent = known
    blocks: list[tuple[int, Key]] = []
    for block in stored.blocks:
        parent = chain(parent, pack(block.token_ids), _media(block.extra_keys))
        blocks.append((block.block_hash, parent))
    windowed = _WINDOWED in stored.kv_cache_spec_kind
    index.stored(
        engine_id,
        blocks,
        block_size=stored.blocks[0].block_size,
        group=group,
        window=stored.kv_cache_spec_sliding_window if windowed else 0,
        copies=stored.HasField("parent_block_hash"),
    )


def _media(keys: Sequence[common_pb2.KvBlockExtraKey]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (key.multimodal.identifier, key.multimodal.offset) for key in keys if key.HasField("multimodal")
    )
