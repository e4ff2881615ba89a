"""Decode context parallel: the cache of a sequence is spread over ranks of the tensor-parallel group.

Of each ``size · interleave`` tokens of a sequence the first ``interleave`` lie on rank 0 of the group, the next on
rank 1 and so on (vLLM's ``cp_kv_cache_interleave_size``). A rank attends with the query heads of all ranks over the
tokens that it has, and the partial results are merged by their log-sum-exp, after which each rank has its own heads
again (Helix parallelism, Bhatia et al. 2025).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import GroupCoordinator, get_dcp_group
from vllm.v1.attention.backend import CommonAttentionMetadata

from npufleet.kernels.ops.attention import merge_attention

NOTHING = -1e30
"""The log-sum-exp of a rank without tokens of a request. Finite, so that a padded request, of which no rank has a
token, gives numbers: −∞ on all ranks would give none.
"""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which tokens of a sequence a rank has."""

    size: int
    """Ranks of the group."""
    rank: int
    interleave: int
    """Tokens that lie on one rank before the next one follows."""

    @classmethod
    def of(cls, config: VllmConfig) -> "Shard | None":
        """This process's, None without decode context parallel."""
        parallel = config.parallel_config
        if parallel.decode_context_parallel_size == 1:
            return None
        group = get_dcp_group()
        return cls(
            size=group.world_size,
            rank=group.rank_in_group,
            interleave=parallel.cp_kv_cache_interleave_size,
        )

    def length(self, tokens: int, rank: int | None = None) -> int:
        """How many of a sequence's first ``tokens`` tokens lie on ``rank``, or here. No rank has more than rank 0."""
        rounds, rest = divmod(tokens, self.size * self.interleave)
        own = rest - (self.rank if rank is None else rank) * self.interleave
        return rounds * self.interleave + min(max(own, 0), self.interleave)

    def lengths(self, tokens: list[int]) -> list[int]:
        """:meth:`length` here of each sequence, and 1 instead of 0: the operators define no log-sum-exp without
        keys, so such a request reads one that is not its own and :func:`without_empty` takes it out.
        """
        return [max(1, self.length(count)) for count in tokens]


def without_empty(lse: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Set ``lse`` float32 [T, heads] in place to :data:`NOTHING` where ``empty`` bool [T] says that this rank has no
    token of the request. Returns it.
    """
    return lse.masked_fill_(empty.unsqueeze(1), NOTHING)


class EmptyRequests:
    """Which requests of a step have no token on this rank, in memory that a captured graph goes on reading."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._memory = torch.zeros(config.scheduler_config.max_num_seqs, dtype=torch.bool, device=device)

    def of(self, common: CommonAttentionMetadata, requests: int) -> torch.Tensor:
        """bool [requests], for the first ``requests`` of the step; the same memory at each step."""
        lengths = common.dcp_local_seq_lens
        assert lengths is not None
        return torch.eq(lengths[:requests], 0, out=self._memory[:requests])


class ContextGroup:
    """The collectives of one layer's attention."""

    def __init__(self, group: GroupCoordinator, *, exchange: bool) -> None:
        """:param exchange: merge by all-to-all and a local merge, instead of all-gather and reduce-scatter."""
        self._group = group
        self._exchange = exchange

    @classmethod
    def of_layer(cls) -> "ContextGroup | None":
        """That of a layer which is being made, None without decode context parallel."""
        config = get_current_vllm_config_or_none()
        if config is None or config.parallel_config.decode_context_parallel_size == 1:
            return None
        return cls(get_dcp_group(), exchange=config.parallel_config.dcp_comm_backend == "a2a")

    @property
    def size(self) -> int:
        """Ranks."""
        return self._group.world_size

    def gather_heads(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' heads side by side: of each part [T, heads, d] the part [T, size · heads, d], contiguous."""
        tokens, heads = parts[0].shape[:2]
        own = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        gathered = self._group.all_gather(own, dim=0).view(self.size, tokens, heads, -1).transpose(0, 1)
        split = gathered.split([part.shape[-1] for part in parts], dim=-1)
        # with one head of a rank a reshape is a view that is not contiguous
        return [part.reshape(tokens, self.size * heads, -1).contiguous() for part in split]

    def gather_tokens(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows ``places`` int64 [n] of all ranks' ``rows`` [R, d], which lie one rank after the other: [n, d]."""
        return self._group.all_gather(rows, dim=0).index_select(0, places)

    def combine(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the ranks' attention over their tokens.

        :param out: [T, size · heads, d] over this rank's tokens; lse float32 [T, size · heads].
        :returns: (out [T, heads, d], lse [T, heads]) of this rank's heads over all ranks' tokens.
        """
        if self._exchange:
            parts, lses = self._to_owners(out), self._to_owners(lse)
            return merge_attention(list(parts.unbind()), list(lses.unbind()))
        tokens, heads = lse.shape
        total = self._group.all_gather(lse, dim=0).view(self.size, tokens, heads).logsumexp(0)
        share = (lse - total).exp().unsqueeze(-1)
        weighted = self._by_owner((out * share).to(out.dtype))
        merged = self._group.reduce_scatter(weighted.flatten(0, 1), dim=0)
        first, own = self._group.rank_in_group * (heads // self.size), heads // self.size
        return merged, total[:, first : first + own]

    def _by_owner(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size · heads, …] as [size, T, heads, …], contiguous: what belongs to each rank in one piece."""
        return x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()

    def _to_owners(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size · heads, …] of this rank to [size, T, heads, …]: this rank's heads from each rank."""
        sent = self._by_owner(x)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group.device_group)
        return received
