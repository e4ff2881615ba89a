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
    """Tokens in each decode request's cache after this step's are written."""
    block_table: torch.Tensor
    """int32 [decode requests, blocks]."""
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
            kv_lens=lens[:decodes],
            block_table=common.block_table_tensor[:decodes],
            new=new,
        )

    def _prefill(
        self, table: torch.Tensor, counts: list[int], lens: list[int], first: int, last: int
    ) -> LatentPrefill:
        """The requests ``first`` … ``last − 1``, all of them with new tokens."""
        counts, lens = counts[first:last], lens[first:last]
        ends, end = [], 0
        for count in counts:
            end += count
            ends.append(end)
        plan = plan_context([n - count for n, count in zip(lens, counts, strict=True)], self._limit)
        chunks = [self._chunk(chunk, table[first:last], [0, *ends]) for chunk in plan]
        prefill = LatentPrefill(query_ends=ends, chunks=chunks, backend=self._prefill_backend)
        self._prefill_backend.prepare_metadata(prefill)  # type: ignore[arg-type]
        return prefill

    def _chunk(self, pieces: list[Piece], table: torch.Tensor, bounds: list[int]) -> ContextChunk:
        """``bounds`` of the requests' new tokens: request r has ``bounds[r]`` … ``bounds[r + 1] − 1``."""
        first, last = pieces[0].request, pieces[-1].request
        tokens = slice(bounds[first], bounds[last + 1])
        kv_ends, end = [], 0
        for piece in pieces:
            end += piece.length
            kv_ends.append(end)
        rows = [[piece.length for piece in pieces], [piece.start for piece in pieces]]
        lengths, starts = async_tensor_h2d(rows, device=table.device, dtype=torch.int32)
        return ContextChunk(
            tokens=tokens,
            query_ends=[bound - tokens.start for bound in bounds[first + 1 : last + 2]],
            kv_ends=kv_ends,
            block_table=table[first : last + 1],
            lengths=lengths,
            starts=starts,
        )
