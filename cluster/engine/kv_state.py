"""What an engine's prefix cache holds, kept from its KV events, so that a late subscriber can be told.

The state is what :mod:`kv_events` has forwarded and not taken back: per data-parallel rank and per block, the
message that a new subscriber needs. Blocks of one chain are told parents first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2

_CHUNK = 512  # blocks in one message of a snapshot

Name = tuple[int, int, int]  # tier, KV-cache group, engine hash


@dataclass(slots=True, eq=False)
class _Block:
    event: common_pb2.KvBlocksStored  # one block and all that goes with it
    copies: int = 1


class RankState:
    """The blocks of one rank."""

    def __init__(self) -> None:
        self.sequence = -1  # of the last batch taken
        self._blocks: dict[Name, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        """Follow ``batch``."""
        self.sequence = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                self._stored(event.stored)
            elif kind == "removed":
                self._removed(event.removed)
            elif kind == "cleared":
                self._blocks.clear()

    def snapshot(self, rank: int) -> Iterator[common_pb2.KvEventBatch]:
        """The messages that bring a subscriber from nothing to this state; the first clears what it knew."""
        ordered = list(self._ordered())
        parts = [ordered[at : at + _CHUNK] for at in range(0, len(ordered), _CHUNK)] or [[]]
        if len(parts) > self.sequence + 1:  # sequence numbers begin at 0: so many chunks would not fit below
            parts = [ordered]
        for number, part in enumerate(parts):
            batch = common_pb2.KvEventBatch(
                sequence_number=max(0, self.sequence - (len(parts) - 1 - number)), dp_rank=rank
            )
            batch.snapshot.index, batch.snapshot.count = number, len(parts)
            batch.snapshot.blocks = sum(block.copies for block in ordered)
            if not number:
                batch.events.add().cleared.SetInParent()
            for block in part:
                for _ in range(block.copies):
                    batch.events.add().stored.CopyFrom(block.event)
            yield batch

    def _stored(self, stored: common_pb2.KvBlocksStored) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        for block in stored.blocks:
            name = (stored.tier, stored.group_idx, block.block_hash)
            known = self._blocks.get(name)
            if known is not None:
                # A report of reuse begins at a prompt's first block and is no second copy.
                known.copies += stored.HasField("parent_block_hash")
            else:
                one = common_pb2.KvBlocksStored()
                one.CopyFrom(stored)
                del one.blocks[:]
                one.blocks.append(block)
                if parent is not None:
                    one.parent_block_hash = parent
                self._blocks[name] = _Block(one)
            parent = block.block_hash

    def _removed(self, removed: common_pb2.KvBlocksRemoved) -> None:
        for block_hash in removed.block_hashes:
            name = (removed.tier, removed.group_idx, block_hash)
            known = self._blocks.get(name)
            if known is not None and known.copies > 1:
                known.copies -= 1
            else:
                self._blocks.pop(name, None)

    def _ordered(self) -> Iterator[_Block]:
        told: set[Name] = set()
        for name in self._blocks:
            line: list[Name] = []
            at: Name | None = name
            while at is not None and at in self._blocks and at not in told:
                told.add(at)
                line.append(at)
                event = self._blocks[at].event
                at = (at[0], at[1], event.parent_block_hash) if event.HasField("parent_block_hash") else None
            yield from (self._blocks[one] for one in reversed(line))
