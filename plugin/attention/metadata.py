"""Attention metadata of one step: host lengths for the fused operator, device tables for one KV cache."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

from .context_parallel import EmptyRequests, Shard
from .dense_context import SpreadStep, spread_step
from .layout import PagedKV, paged_kv, scale_block_table, scale_slots


@dataclass(kw_only=True)
class DenseMetadata(AttentionMetadata):
    """What one step's attention needs beside Q, K and V; lengths are host lists, as the operator wants.

    With decode context parallel ``query_ends``, ``kv_lens`` (here at least 1 and of this rank alone) and
    ``block_table`` are those of the requests with one new token, and the others are in ``spread``.
    """

    query_ends: list[int]
    """Where each request's queries end in the token dimension (cumulative)."""
    kv_lens: list[int]
    """Tokens in each request's cache after this step's keys are written."""
    num_tokens: int
    """Tokens that have queries; the tensors of a padded batch may hold more."""
    block_table: torch.Tensor
    """int32 [requests, blocks], in half pages."""
    slots: torch.Tensor
    """int32 [tokens], slots of the half-page tensors; −1 is padding, or a token of another rank."""
    spread: SpreadStep | None = None
    """With decode context parallel: how the step is attended to."""


def host_lengths(common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    """``(query_ends, kv_lens)`` of a batch, from host memory only: nothing waits for the device.

    vLLM's host bound on the sequence lengths is exact unless draft tokens are verified while the next step is
    already scheduled, which the platform does not allow. A batch that is padded for a graph has requests
    without queries behind the real ones, while the padded tokens do have queries: they are dealt out evenly,
    and each such request reads as many tokens of the null block, so that every query has a row to attend to.
    """
    assert common.seq_lens_cpu_upper_bound is not None
    ends: list[int] = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
    lens: list[int] = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
    missing = common.num_actual_tokens - ends[-1]
    if missing <= 0:
        return ends, lens
    real = len(lens)
    while real > 0 and lens[real - 1] == 0:
        real -= 1
    padding = len(lens) - real
    if padding == 0 or missing % padding:
        return ends, lens
    each, last = missing // padding, ends[-1]
    for i in range(padding):
        ends[real + i] = last + each * (i + 1)
        lens[real + i] = each
    return ends, lens


class DenseMetadataBuilder(AttentionMetadataBuilder[DenseMetadata]):
    """Builds :class:`DenseMetadata` for the layers of one KV cache group.

    The device tables are written into buffers that live as long as the builder, because a captured graph
    reads them at the addresses it was captured with.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        self._max_requests = scheduler.max_num_seqs
        self._slots = torch.empty(scheduler.max_num_batched_tokens, dtype=torch.int32, device=device)
        self._block_table: torch.Tensor | None = None
        self._cache: PagedKV | None = None
        self._shard = Shard.of(vllm_config)
        if self._shard is not None:
            self._empty = EmptyRequests(vllm_config, device)
            self.reorder_batch_threshold = 1  # requests with one new token first

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DenseMetadata:
        """Metadata of one step; ``common_prefix_len`` (always 0) and ``fast_build`` change nothing."""
        common = common_attn_metadata
        ends, lens = host_lengths(common)
        table, slots = common.block_table_tensor, common.slot_mapping
        if not isinstance(self.kv_cache_spec, EncoderOnlyAttentionSpec):
            cache = self._bound_cache()
            table = scale_block_table(table, cache.step, self._table_buffer(table))
            slots = scale_slots(slots, cache.step, cache.block_size, self._slots[: slots.shape[0]])
            if self._shard is not None:
                return self._spread(common, ends, lens, table, slots, self._shard)
        return DenseMetadata(
            query_ends=ends, kv_lens=lens, num_tokens=ends[-1], block_table=table, slots=slots
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> DenseMetadata:
        """Metadata of a step without requests, which must not write to the cache. With decode context parallel
        vLLM gives such a step slots, the same to each request.
        """
        common_attn_metadata.slot_mapping.fill_(-1)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _spread(
        self,
        common: CommonAttentionMetadata,
        ends: list[int],
        lens: list[int],
        table: torch.Tensor,
        slots: torch.Tensor,
        shard: Shard,
    ) -> DenseMetadata:
        """Metadata of a step whose requests' tokens are spread over ranks."""
        step = spread_step(ends, lens, table, partial(self._empty.of, common), shard)
        return DenseMetadata(
            query_ends=ends[: step.decodes],
            kv_lens=shard.lengths(lens[: step.decodes]),
            num_tokens=ends[-1],
            block_table=table[: step.decodes],
            slots=slots,
            spread=step,
        )

    def _table_buffer(self, table: torch.Tensor) -> torch.Tensor:
        """The first rows of a persistent buffer as wide as ``table``."""
        rows, width = table.shape
        buffer = self._block_table
        if buffer is None or buffer.shape[1] != width:
            buffer = table.new_zeros((max(self._max_requests, rows), width))
            self._block_table = buffer
        assert rows <= buffer.shape[0]
        return buffer[:rows]

    def _bound_cache(self) -> PagedKV:
        """The layout of the group's cache, read from its first layer once the runner has bound it."""
        if self._cache is None:
            assert isinstance(self.kv_cache_spec, AttentionSpec)
            layers = self.vllm_config.compilation_config.static_forward_context
            views = [paged_kv(layers[n].kv_cache, layers[n].num_kv_heads) for n in self.layer_names]
            steps = {view.step for view in views}
            if len(steps) != 1:
                raise ValueError(
                    f"the layers of one KV cache group have pages {sorted(steps)} half pages apart; set "
                    "VLLM_KV_CACHE_LAYOUT=LBHNC, which gives each layer pages of its own"
                )
            self._cache = views[0]
        return self._cache
