"""Attention metadata of one step for multi-head latent attention: decode requests first, then prefills."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from npufleet.kernels.ops.mla import PAGE_TOKENS

from .context_parallel import EmptyRequests, Shard
from .metadata import host_lengths
from .mla_prefill import NPUMLAPrefillBackend


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of the earlier tokens of one request."""

    request: int
    start: int
    """Its first token, a multiple of the page's tokens."""
    length: int


def plan_context(context: list[int], limit: int) -> list[list[Piece]]:
    """Cut earlier tokens into chunks that fit in memory when they are expanded.

    :param context: earlier tokens of each prefilling request, 0 if none.
    :param limit: most tokens of a chunk, at least one page.
    :returns: chunks, each of pieces of adjacent requests, one of a request; together they hold each token once.
    """
    assert limit >= PAGE_TOKENS
    chunks: list[list[Piece]] = []
    room = 0  # of the last chunk

    def fitting(left: int) -> int:
        """As many of ``left`` tokens as fit; whole pages, unless they are the last ones."""
        return left if left <= room else room - room % PAGE_TOKENS

    for request, length in enumerate(context):
        start = 0
        while start < length:
            take = fitting(length - start)
            if start or not take:  # a request goes on in another chunk
                chunks.append([])
                room = limit
                take = fitting(length - start)
            chunks[-1].append(Piece(request=request, start=start, length=take))
            start, room = start + take, room - take
        if not length:
            room = 0  # the requests of a chunk are adjacent
    return chunks


@dataclass(frozen=True, kw_only=True)
class ContextChunk:
    """Earlier tokens that are expanded at once. Requests and tokens count from the first prefill."""

    tokens: slice
    """The new tokens that see them."""
    query_ends: list[int]
    """Where each request's new tokens end, within ``tokens``."""
    kv_ends: list[int]
    """Where each request's earlier tokens end, in the packed chunk; the last is their number."""
    block_table: torch.Tensor
    """int32 [requests, blocks]."""
    lengths: torch.Tensor
    """int32 [requests]: earlier tokens of each."""
    starts: torch.Tensor
    """int32 [requests]: the first of them."""
    rows: int
    """Tokens that are read from this rank's cache: the sum of ``lengths``."""
    places: torch.Tensor | None = None
    """With decode context parallel int64 [``kv_ends[-1]``]: where the earlier tokens are among the rows that all
    ranks read; else the rows are the tokens. Each rank reads as much as rank 0, which has most.
    """


def places_of_tokens(pieces: list[Piece], context: list[int], shard: Shard) -> tuple[torch.Tensor, list[int]]:
    """Where the tokens of a chunk are once every rank has read its ``pieces`` and all rows lie one rank after the
    other.

    :param pieces: in tokens of rank 0; the other ranks read as many rows, of which the last may hold no token.
    :param context: earlier tokens of each request, on all ranks together.
    :returns: (rows int64, request by request; where each request's end). In a request they come rank by rank,
        which attention without a mask does not see.
    """
    rows, before, count = sum(piece.length for piece in pieces), 0, 0
    runs, ends = [], []
    for piece in pieces:
        for rank in range(shard.size):
            held = shard.length(context[piece.request], rank) - piece.start
            held = min(max(held, 0), piece.length)
            first = rank * rows + before
            runs.append(torch.arange(first, first + held))
            count += held
        ends.append(count)
        before += piece.length
    return torch.cat(runs), ends


@dataclass(frozen=True, kw_only=True)
class LatentPrefill:
    """The prefilling requests of a step."""

    query_ends: list[int]
    """Where each request's new tokens end, counted from the first prefill."""
    chunks: list[ContextChunk]
    backend: NPUMLAPrefillBackend


@dataclass(kw_only=True)
class LatentMetadata(MLACommonMetadata):
    """What one step's latent attention needs; lengths are host lists, as the operators want.

    ``num_decode_tokens`` is how many of the first tokens belong to decode requests, ``slot_mapping`` int64
    [tokens] block · 128 + offset, −1 for padding. vLLM's KV connectors know an MLA layer by the base class.
    """

    num_tokens: int
    """Tokens that have queries; the tensors of a padded batch may hold more."""
    query_ends: list[int]
    """1, 2 … for the decode requests, which have one query each."""
    kv_lens: list[int]
    """Tokens in each decode request's cache on this rank after this step's are written, at least 1."""
    block_table: torch.Tensor
    """int32 [decode requests, blocks]."""
    empty: torch.Tensor | None
    """With decode context parallel bool [decode requests]: this rank has no token of the request."""
    new: LatentPrefill | None
    """The requests with several new tokens, None if there are none."""


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    """Builds :class:`LatentMetadata` for the layers of one KV cache group.

    Block table and slots are vLLM's own buffers, which keep their addresses: a captured graph reads them.
    """

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
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._prefill_backend = layer.prefill_backend.clone()
        assert isinstance(self._prefill_backend, NPUMLAPrefillBackend)
        # vLLM's bound on the earlier tokens that are expanded at once; its memory is measured with it.
        self._limit = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        self._shard = Shard.of(vllm_config)
        self._empty = None if self._shard is None else EmptyRequests(vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LatentMetadata:
        """Metadata of one step; ``common_prefix_len`` (always 0) and ``fast_build`` change nothing."""
        common = common_attn_metadata
        ends, lens = host_lengths(common)
        starts = [0, *ends]
        counts = [end - start for start, end in zip(starts, ends, strict=False)]
        active = next((i for i, count in enumerate(counts) if not count), len(counts))
        assert not any(counts[active:])
        decodes = next((i for i, count in enumerate(counts[:active]) if count > 1), active)
        new = None
        if decodes < active:
            new = self._prefill(common.block_table_tensor, counts, lens, decodes, active)
        return LatentMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_prefills=active - decodes,
            num_tokens=ends[active - 1],
            query_ends=ends[:decodes],
            kv_lens=lens[:decodes] if self._shard is None else self._shard.lengths(lens[:decodes]),
            block_table=common.block_table_tensor[:decodes],
            empty=None if self._empty is None else self._empty.of(common, decodes),
            new=new,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> LatentMetadata:
        """Metadata of a step without requests, which must not write to the cache. With decode context parallel
        vLLM gives such a step slots, the same to each request.
        """
        common_attn_metadata.slot_mapping.fill_(-1)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _prefill(
        self, table: torch.Tensor, counts: list[int], lens: list[int], first: int, last: int
    ) -> LatentPrefill:
        """The requests ``first`` … ``last − 1``, all of them with new tokens."""
        counts, lens = counts[first:last], lens[first:last]
        ends, end = [], 0
        for count in counts:
            end += count
            ends.append(end)
        context = [n - count for n, count in zip(lens, counts, strict=True)]
        plan = self._plan(context)
        chunks = [self._chunk(chunk, table[first:last], [0, *ends], context) for chunk in plan]
        prefill = LatentPrefill(query_ends=ends, chunks=chunks, backend=self._prefill_backend)
        self._prefill_backend.prepare_metadata(prefill)  # type: ignore[arg-type]
        return prefill

    def _plan(self, context: list[int]) -> list[list[Piece]]:
        """Chunks of the earlier tokens; with decode context parallel in tokens of rank 0, the same on all ranks."""
        if self._shard is None:
            return plan_context(context, self._limit)
        shard = self._shard
        limit = max(self._limit // shard.size, PAGE_TOKENS)
        return plan_context([shard.length(count, 0) for count in context], limit)

    def _chunk(
        self, pieces: list[Piece], table: torch.Tensor, bounds: list[int], context: list[int]
    ) -> ContextChunk:
        """``bounds`` of the requests' new tokens: request r has ``bounds[r]`` … ``bounds[r + 1] − 1``."""
        first, last = pieces[0].request, pieces[-1].request
        tokens = slice(bounds[first], bounds[last + 1])
        kv_ends, rows = [], 0
        for piece in pieces:
            rows += piece.length
            kv_ends.append(rows)
        places = None
        if self._shard is not None:
            found, kv_ends = places_of_tokens(pieces, context, self._shard)
            places = async_tensor_h2d(found, device=table.device)
        reads = [[piece.length for piece in pieces], [piece.start for piece in pieces]]
        lengths, starts = async_tensor_h2d(reads, device=table.device, dtype=torch.int32)
        return ContextChunk(
            tokens=tokens,
            query_ends=[bound - tokens.start for bound in bounds[first + 1 : last + 2]],
            kv_ends=kv_ends,
            block_table=table[first : last + 1],
            lengths=lengths,
            starts=starts,
            rows=rows,
            places=places,
        )
