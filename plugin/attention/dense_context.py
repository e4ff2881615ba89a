"""Dense attention with decode context parallel: a rank has a part of the tokens in its cache, and a step's new ones.

All ranks of a context group share their key heads, so each has the keys and values of all new tokens of a step. A
request with one new token attends over the cache, where that token is on one of the ranks. With several, the new
tokens attend among themselves and, without a mask, over the earlier tokens in the cache; the two are merged.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from npufleet.kernels.ops.attention import PagedAttentionCall, merge_attention, varlen_attention_part

from .context_parallel import ContextGroup, Shard, without_empty
from .layout import PagedKV

Attend = Callable[[PagedAttentionCall, list[int], list[int]], None]
"""Launch or capture a call with the lengths ``query_ends`` and ``kv_lens``."""


@dataclass(frozen=True, kw_only=True)
class EarlierTokens:
    """What new tokens see in the cache. Tokens count from the first prefill."""

    tokens: slice
    """The new tokens that see any."""
    query_ends: list[int]
    """Where each request's new tokens end, within ``tokens``."""
    kv_lens: list[int]
    """Earlier tokens of each request on this rank, at least 1."""
    block_table: torch.Tensor
    """int32 [requests, blocks]."""
    empty: torch.Tensor
    """bool [new tokens]: this rank has no earlier token of the request."""


@dataclass(frozen=True, kw_only=True)
class SpreadStep:
    """A step whose requests' tokens are spread over ranks: requests with one new token come first."""

    decodes: int
    """Requests with one new token, whose lengths and blocks are those of the step's metadata."""
    empty: torch.Tensor
    """bool [decodes]: this rank has no token of the request."""
    prefill_ends: list[int]
    """Where the other requests' new tokens end, counted from the first of them."""
    earlier: EarlierTokens | None


def spread_step(
    ends: list[int], lens: list[int], table: torch.Tensor, empty: Callable[[int], torch.Tensor], shard: Shard
) -> SpreadStep:
    """The step of requests with new tokens up to ``ends`` (cumulative) and ``lens`` tokens after it, on all ranks
    together.

    :param table: int32 [requests, blocks].
    :param empty: gives :attr:`SpreadStep.empty` of that many requests.
    """
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    last = next((i for i in range(len(counts), decodes, -1) if counts[i - 1]), decodes)
    base = ends[decodes - 1] if decodes else 0
    prefill_ends = [end - base for end in ends[decodes:last]]
    context = [lens[i] - counts[i] for i in range(decodes, last)]
    return SpreadStep(
        decodes=decodes,
        empty=empty(decodes),
        prefill_ends=prefill_ends,
        earlier=_earlier(prefill_ends, context, table[decodes:last], shard),
    )


def _earlier(ends: list[int], context: list[int], table: torch.Tensor, shard: Shard) -> EarlierTokens | None:
    """From the first to the last request that has any; the same requests on all ranks."""
    seeing = [i for i, count in enumerate(context) if count]
    if not seeing:
        return None
    first, last = seeing[0], seeing[-1] + 1
    bounds = [0, *ends][first : last + 1]
    context = context[first:last]
    empty: list[bool] = []
    for start, end, count in zip(bounds, bounds[1:], context, strict=False):
        empty.extend([shard.length(count) == 0] * (end - start))
    return EarlierTokens(
        tokens=slice(bounds[0], bounds[-1]),
        query_ends=[bound - bounds[0] for bound in bounds[1:]],
        kv_lens=shard.lengths(context),
        block_table=table[first:last],
        empty=async_tensor_h2d(empty, device=table.device, dtype=torch.bool),
    )


@dataclass(frozen=True, kw_only=True)
class SpreadAttention:
    """One layer's attention in one step."""

    group: ContextGroup
    pages: PagedKV
    scale: float
    attend: Attend

    def decode(
        self, query: torch.Tensor, ends: list[int], lens: list[int], table: torch.Tensor, empty: torch.Tensor
    ) -> torch.Tensor:
        """Queries [T, heads, head] of one new token each over all ranks' caches: [T, heads, head]."""
        return self._over_caches(query, ends, lens, table, empty, causal=True)[0]

    def prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: SpreadStep
    ) -> torch.Tensor:
        """New tokens' query [T, heads, head], key and value [T, kv_heads, head] to [T, heads, head]."""
        out, lse = varlen_attention_part(query, key, value, step.prefill_ends, scale=self.scale)
        earlier = step.earlier
        if earlier is not None:
            seeing = earlier.tokens
            part, part_lse = self._over_caches(
                query[seeing],
                earlier.query_ends,
                earlier.kv_lens,
                earlier.block_table,
                earlier.empty,
                causal=False,
            )
            out[seeing], _ = merge_attention([out[seeing], part], [lse[seeing], part_lse])
        return out

    def _over_caches(
        self,
        query: torch.Tensor,
        ends: list[int],
        lens: list[int],
        table: torch.Tensor,
        empty: torch.Tensor,
        *,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's heads over all ranks' caches: [T, heads, head] and the log-sum-exp float32 [T, heads]."""
        (queries,) = self.group.gather_heads(query)
        lse = queries.new_empty(*queries.shape[:2], 1, dtype=torch.float32)
        call = PagedAttentionCall(
            query=queries,
            key_cache=self.pages.key_cache,
            value_cache=self.pages.value_cache,
            block_table=table,
            out=torch.empty_like(queries),
            scale=self.scale,
            causal=causal,
            lse=lse,
        )
        self.attend(call, ends, lens)
        return self.group.combine(call.out, without_empty(lse.squeeze(-1), empty))
