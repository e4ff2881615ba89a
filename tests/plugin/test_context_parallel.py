"""Decode context parallel: where the tokens of a sequence lie, and attention whose ranks are threads here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from npufleet.kernels.ops.attention import PagedAttentionCall
from npufleet.kernels.ops.kv_cache import write_kv
from npufleet.plugin.attention import context_parallel
from npufleet.plugin.attention.context_parallel import NOTHING, ContextGroup, EmptyRequests, Shard
from npufleet.plugin.attention.dense_context import SpreadAttention, spread_step
from npufleet.plugin.attention.layout import PagedKV
from npufleet.plugin.attention.mla_metadata import LatentMetadataBuilder, Piece, places_of_tokens
from npufleet.plugin.triton_kernels import compute_slot_mapping

from ..kernels import formulas
from .test_metadata import batch
from .test_mla import builder

sizes, interleaves = st.integers(2, 5), st.sampled_from([1, 2, 16, 128])
NPU = torch.device("npu:0")


@given(sizes, interleaves, st.integers(0, 2000))
def test_each_token_lies_on_one_rank(size: int, interleave: int, tokens: int) -> None:
    owners = [token // interleave % size for token in range(tokens)]
    for rank in range(size):
        shard = Shard(size=size, rank=rank, interleave=interleave)
        assert shard.length(tokens) == owners.count(rank) <= shard.length(tokens, 0)
        assert shard.length(tokens) == int(
            get_dcp_local_seq_lens(torch.tensor([tokens]), size, rank, interleave)[0]
        )


def slots_of(
    shard: Shard, lengths: list[int], starts: list[int], table: torch.Tensor, block: int
) -> torch.Tensor:
    """Slots of ``lengths`` new tokens of each request, of which ``starts`` came before."""
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    count, out = len(positions), torch.empty(len(positions) + 3, dtype=torch.int64)
    compute_slot_mapping(
        count, count + 3, ends, positions, table, table.stride(0), out, block,
        shard.size, shard.rank, shard.interleave, -1, 1024,
    )  # fmt: skip
    assert (out[count:] == -1).all()
    return out[:count]


@given(sizes, interleaves, st.lists(st.integers(1, 900), min_size=1, max_size=3))
def test_slots_follow_one_another_in_a_ranks_blocks(size: int, interleave: int, lengths: list[int]) -> None:
    block = 128
    table = torch.randperm(len(lengths) * 8)[: len(lengths) * 8].view(len(lengths), 8).int()
    for rank in range(size):
        shard = Shard(size=size, rank=rank, interleave=interleave)
        slots = slots_of(shard, lengths, [0] * len(lengths), table, block).split(lengths)
        for request, (found, length) in enumerate(zip(slots, lengths, strict=True)):
            owned = [token // interleave % size == rank for token in range(length)]
            assert (found >= 0).tolist() == owned
            places = torch.arange(shard.length(length))
            wanted = table[request, places // block].long() * block + places % block
            assert torch.equal(found[found >= 0], wanted)


@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=4), sizes, interleaves, st.sampled_from([256, 700])
)
def test_chunks_of_latents_hold_each_earlier_token_once(
    context: list[int], size: int, interleave: int, limit: int
) -> None:
    made = builder(limit=limit)
    made._shard = Shard(size=size, rank=1, interleave=interleave)
    seen: list[set[tuple[int, int]]] = [set() for _ in context]
    for pieces in made._plan(context):
        rows = sum(piece.length for piece in pieces)
        assert rows <= max(limit // size, 128)
        read = [(p.request, p.start + i) for p in pieces for i in range(p.length)]
        places, ends = places_of_tokens(pieces, context, made._shard)
        assert len(places) == ends[-1] and len(set(ends)) == len(ends) == len(pieces)
        start = 0
        for piece, end in zip(pieces, ends, strict=True):
            for place in places[start:end].tolist():
                rank, row = divmod(place, rows)
                request, local = read[row]
                assert request == piece.request and local < made._shard.length(context[request], rank)
                assert (rank, local) not in seen[request]
                seen[request].add((rank, local))
            start = end
    assert [len(x) for x in seen] == context


def test_a_step_of_latents_on_the_second_rank() -> None:
    """A decode whose first token is on the other rank, one with 3 of 7 here, and a prefill with 5 earlier tokens."""
    made = builder()
    made._shard = Shard(size=2, rank=1, interleave=1)
    made._empty = EmptyRequests(config(4), torch.device("cpu"))
    common = batch([1, 1, 4], [0, 6, 5])
    common.dcp_local_seq_lens = torch.tensor([0, 3, 4], dtype=torch.int32)
    step = made.build(0, common)
    assert (step.query_ends, step.kv_lens) == ([1, 2], [1, 3])
    assert step.empty is not None and step.empty.tolist() == [True, False]
    assert step.new is not None
    (chunk,) = step.new.chunks
    assert (chunk.kv_ends, chunk.rows, chunk.lengths.tolist()) == ([5], 3, [3])
    assert chunk.places is not None and chunk.places.tolist() == [0, 1, 2, 3, 4]
    assert step.empty.data_ptr() == made.build(0, common).empty.data_ptr(), "a captured graph reads it"  # type: ignore[union-attr]


def config(requests: int) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=requests))


@dataclass(kw_only=True)
class Ranks:
    """What the threads of a group share."""

    size: int
    barrier: threading.Barrier = field(init=False)
    given: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.given = [torch.empty(0)] * self.size

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        torch.npu.synchronize()
        self.given[rank] = tensor
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


@dataclass(kw_only=True)
class Group:
    """The part of vLLM's group coordinator that attention uses; it is its own ``device_group``."""

    ranks: Ranks
    rank_in_group: int

    @property
    def world_size(self) -> int:
        return self.ranks.size

    @property
    def device_group(self) -> "Group":
        return self

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        return torch.cat(self.ranks.meet(self.rank_in_group, x))

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0 and x.is_contiguous()
        total = torch.stack(self.ranks.meet(self.rank_in_group, x)).sum(0)
        return total.chunk(self.world_size)[self.rank_in_group].clone()


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    assert sent.is_contiguous()
    pieces = [x[group.rank_in_group] for x in group.ranks.meet(group.rank_in_group, sent)]
    received.copy_(torch.stack(pieces))


def on_all_ranks(size: int, work: Callable[[Group], torch.Tensor]) -> list[torch.Tensor]:
    ranks = Ranks(size=size)

    def one(rank: int) -> torch.Tensor:
        torch.npu.set_device(NPU)
        try:
            return work(Group(ranks=ranks, rank_in_group=rank))
        except BaseException:  # raised again: the other ranks wait for this one and are let go first
            ranks.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failed = [future.exception() for future in futures]
    for error in failed:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


@pytest.mark.parametrize("exchange", [False, True], ids=["reduce-scatter", "all-to-all"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 16)])
def test_attention_over_spread_caches(
    size: int, interleave: int, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes with few and many tokens, prefills with and without earlier ones, one rank's cache often empty; two
    heads on each of two ranks, one on each of three.
    """
    monkeypatch.setattr(context_parallel.dist, "all_to_all_single", all_to_all)
    torch.manual_seed(3)
    own = 4 - size
    counts, earlier, block, heads, head = [1, 1, 1, 4, 3, 2], [0, 1, 290, 0, 1, 77], 16, own * size, 16
    lens = [a + b for a, b in zip(counts, earlier, strict=True)]
    query = torch.randn(sum(counts), heads, head)
    keys, values = ([torch.randn(n, 1, head) for n in lens] for _ in range(2))
    table = torch.randperm(len(lens) * 12).view(len(lens), 12).int()
    ends = torch.tensor(counts).cumsum(0).tolist()
    new_key, new_value = (
        torch.cat([x[-n:] for x, n in zip(rows, counts, strict=True)]).to(NPU) for rows in (keys, values)
    )

    def rank(group: Group) -> torch.Tensor:
        shard = Shard(size=size, rank=group.rank_in_group, interleave=interleave)
        caches = torch.randn(2, len(lens) * 12, block, 1, head, device=NPU)
        slots = slots_of(shard, lens, [0] * len(lens), table, block).int().to(NPU)
        write_kv(torch.cat(keys).to(NPU), torch.cat(values).to(NPU), caches[0], caches[1], slots)
        here = query[:, own * shard.rank : own * (shard.rank + 1)].contiguous().to(NPU)
        empty = torch.tensor([shard.length(n) == 0 for n in lens], device=NPU)
        step = spread_step(ends, lens, table.to(NPU), lambda n: empty[:n], shard)
        assert step.decodes == 3 and step.prefill_ends == [4, 7, 9]
        spread = SpreadAttention(
            group=ContextGroup(group, exchange=exchange),  # type: ignore[arg-type]
            pages=PagedKV(key_cache=caches[0], value_cache=caches[1], step=2, block_size=block),
            scale=0.3,
            attend=PagedAttentionCall.launch,
        )
        decoded = spread.decode(here[:3], ends[:3], shard.lengths(lens[:3]), table[:3].to(NPU), step.empty)
        return torch.cat((decoded, spread.prefill(here[3:], new_key[3:], new_value[3:], step))).cpu()

    found = torch.cat(on_all_ranks(size, rank), dim=1)
    torch.testing.assert_close(
        found.double(), formulas.attention(query, keys, values, counts, 0.3), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("exchange", [False, True], ids=["reduce-scatter", "all-to-all"])
def test_a_padded_request_gives_numbers(exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has a token of it: what comes out is of no use, but no NaN that would spread."""
    monkeypatch.setattr(context_parallel.dist, "all_to_all_single", all_to_all)

    def rank(group: Group) -> torch.Tensor:
        lse = torch.full((1, 4), NOTHING, device=NPU)
        return ContextGroup(group, exchange=exchange).combine(torch.ones(1, 4, 16, device=NPU), lse)[0]  # type: ignore[arg-type]

    assert all(out.isfinite().all() for out in on_all_ranks(2, rank))


def test_pieces_are_those_of_rank_0() -> None:
    """Rank 1 of two has 2 of 5 tokens and reads 3, of which the last is none."""
    shard = Shard(size=2, rank=0, interleave=1)
    places, ends = places_of_tokens([Piece(request=0, start=0, length=3)], [5], shard)
    assert places.tolist() == [0, 1, 2, 3, 4] and ends == [5]
    assert LatentMetadataBuilder.reorder_batch_threshold == 1
