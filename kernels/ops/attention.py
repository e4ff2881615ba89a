"""Fused attention over paged or packed keys, eager and inside a captured graph.

Formula: softmax(scale · Q Kᵀ + mask) V per request, the last query of a request aligned with its last key
(FlashAttention, Dao 2023; torch_npu's npu_fused_infer_attention_score). Requests are packed one after the
other (layout TND). Lengths are host lists: the operator plans its work from them before it is launched.

Layout TND serves decode too: in the batched layouts the operator ignores a window when each query is one
token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch_npu

CAUSAL, BAND, NO_MASK = 3, 4, 0  # sparse modes
MASK_SIDE = 2048
MOST_PARTS = 16  # partial results that npu_attention_update merges at most


@lru_cache(maxsize=64)
def causal_mask(device: torch.device) -> torch.Tensor:
    """The mask that sparse modes 3 and 4 want: int8 [2048, 2048], 1 above the diagonal; one per device."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).triu_(1).to(device)


@lru_cache(maxsize=64)
def no_lse(device: torch.device) -> torch.Tensor:
    """Where the operator may put a log-sum-exp that nobody asked for."""
    return torch.empty(1, dtype=torch.float32, device=device)


def _visibility(device: torch.device, sliding_window: int | None) -> dict[str, Any]:
    """Arguments for causal attention; a window of w keys includes the query's own, so w − 1 lie before it."""
    if sliding_window is None:
        return {"atten_mask": causal_mask(device), "sparse_mode": CAUSAL}
    if sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, it must be at least 1")
    return {
        "atten_mask": causal_mask(device),
        "sparse_mode": BAND,
        "pre_tokens": sliding_window - 1,
        "next_tokens": 0,
    }


@dataclass(frozen=True, kw_only=True)
class PagedAttentionCall:
    """One attention launch over the paged cache, without its lengths: what stays the same from step to step.

    Tensors keep their addresses for as long as a graph that captured the call is replayed.
    """

    query: torch.Tensor  # [T, heads, head], contiguous
    key_cache: torch.Tensor  # [blocks, block, kv_heads, head], contiguous; block a multiple of 16 up to 512
    value_cache: torch.Tensor  # [blocks, block, kv_heads, value_head], contiguous
    block_table: torch.Tensor  # int32 [B, most blocks of a request]
    out: torch.Tensor  # [T, heads, value_head], overwritten
    scale: float
    sliding_window: int | None = None  # keys a query sees at most, its own included
    causal: bool = True  # the last query is the last key's; else every query sees all keys
    lse: torch.Tensor | None = None  # float32 [T, heads, 1], overwritten with the scaled scores' log-sum-exp
    workspace: torch.Tensor | None = None  # from :meth:`get_workspace`; needed inside a graph

    def _arguments(
        self, query_ends: list[int], kv_lens: list[int]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        assert self.causal or self.sliding_window is None
        device = self.query.device
        visible = _visibility(device, self.sliding_window) if self.causal else {"sparse_mode": NO_MASK}
        blocks, block, kv_heads, _ = self.key_cache.shape
        tensors = (
            self.query,
            self.key_cache.view(blocks, block, -1),
            self.value_cache.view(blocks, block, -1),
        )
        return tensors, {
            "actual_seq_lengths": query_ends,
            "actual_seq_lengths_kv": kv_lens,
            "block_table": self.block_table,
            "block_size": block,
            "input_layout": "TND",
            "num_heads": self.query.shape[1],
            "num_key_value_heads": kv_heads,
            "scale": self.scale,
            **visible,
            **({} if self.lse is None else {"softmax_lse_flag": True}),
        }

    def get_workspace(self, query_ends: list[int], kv_lens: list[int]) -> torch.Tensor:
        """A workspace large enough for any lengths of this shape. Ask once per shape, before the capture."""
        tensors, arguments = self._arguments(query_ends, kv_lens)
        return torch_npu._npu_fused_infer_attention_score_get_max_workspace(*tensors, **arguments)

    def launch(self, query_ends: list[int], kv_lens: list[int]) -> None:
        """Compute into ``out``. ``query_ends`` is cumulative and ends at T; ``kv_lens`` is per request, at least 1
        where ``lse`` is given.
        """
        tensors, arguments = self._arguments(query_ends, kv_lens)
        lse = no_lse(self.query.device) if self.lse is None else self.lse
        torch_npu.npu_fused_infer_attention_score.out(
            *tensors, **arguments, workspace=self.workspace, out=[self.out, lse]
        )

    def capture(self, stream: Any, query_ends: list[int], kv_lens: list[int]) -> "CapturedAttention":
        """Launch inside an open graph capture on ``stream``, as a task whose lengths can be replaced at each
        replay.

        The graph waits at this point until :meth:`CapturedAttention.update` has run. ``query``, ``out``
        and the workspace belong to the graph's memory pool and are held weakly afterwards, so that later
        layers may reuse it.
        """
        return CapturedAttention.capture(self, stream, query_ends, kv_lens)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a workspace depends on beside the number of tokens."""
        kind = (self.query.shape[1:], self.key_cache.shape, self.query.dtype, self.sliding_window)
        return (*kind, self.causal, self.lse is None)

    def weak(self) -> "PagedAttentionCall":
        """The same call holding what lives in a graph's memory pool weakly."""
        lse = None if self.lse is None else weak_reference(self.lse)
        return replace(self, query=weak_reference(self.query), out=weak_reference(self.out), lse=lse)


class AttentionCall(Protocol):
    """One attention launch without its lengths: what a captured graph needs of it."""

    def launch(self, query_ends: list[int], kv_lens: list[int]) -> None:
        """Compute, with these lengths."""

    def weak(self) -> "AttentionCall":
        """The same call without owning what lives in a graph's memory pool."""


@dataclass(frozen=True, kw_only=True)
class CapturedAttention:
    """An attention launch inside a captured graph."""

    call: AttentionCall
    handle: Any  # torch_npu's task-group handle
    gate: Any  # ExternalEvent: opened by update, closed again by the replay that passes it

    @classmethod
    def capture(
        cls, call: AttentionCall, stream: Any, query_ends: list[int], kv_lens: list[int]
    ) -> "CapturedAttention":
        """Launch ``call`` in the open capture on ``stream``, behind a gate and as a task of its own."""
        gate = _closed_gate(stream)
        gate.wait(stream)
        gate.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        call.launch(query_ends, kv_lens)
        handle = torch.npu.graph_task_group_end(stream)
        return cls(call=call.weak(), handle=handle, gate=gate)

    def update(self, stream: Any, query_ends: list[int], kv_lens: list[int]) -> None:
        """Give the task the lengths of the next replay and open its gate; once before each replay, on
        ``stream``.
        """
        update_all([self], stream, query_ends, kv_lens)


@lru_cache(maxsize=64)
def _gate_stream(device: int) -> Any:
    """A stream beside those that are captured; one per device."""
    return torch.npu.Stream(device)


def _closed_gate(captured: Any) -> Any:
    """An event that the graph captured on this stream can wait for. torch_npu 2.13 makes the device's event at the
    first ``record`` and drops a ``wait`` that comes before, so it is recorded and reset once, beside the capture.

    torch's streams come from a pool in turn, so another stream object may be the captured stream itself, and the
    graph would then close its own gate at each replay.
    """
    gate, aside = torch.npu.ExternalEvent(), _gate_stream(torch.npu.current_device())
    while aside == captured:
        aside = torch.npu.Stream()
    gate.record(aside)
    gate.reset(aside)
    return gate


def update_all(
    captured: Iterable[CapturedAttention], stream: Any, query_ends: list[int], kv_lens: list[int]
) -> None:
    """:meth:`CapturedAttention.update` of all layers of a step, which have the same lengths. ``stream`` is
    made current once, because switching costs more than an update.
    """
    with torch.npu.stream(stream):
        for one in captured:
            torch.npu.graph_task_update_begin(stream, one.handle)
            one.call.launch(query_ends, kv_lens)
            torch.npu.graph_task_update_end(stream)
            one.gate.record(stream)


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without owning it."""
    return torch_npu._C._weak_ref_tensor(tensor)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ends: list[int],
    kv_lens: list[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over the paged cache: prefill, chunked prefill and decode in one
    call.

    :param query: [T, heads, head] in fp16 or bf16; heads a multiple of kv_heads.
    :param key_cache: [blocks, block, kv_heads, head], contiguous, of the same dtype; value_cache likewise.
    :param block_table: int32 [B, n]: the blocks of each request in order.
    :param query_ends: cumulative query lengths, one per request, the last is T.
    :param kv_lens: keys of each request, its own queries included; 0 gives zeros.
    :param sliding_window: keys a query sees at most, its own included; None for all.
    :param out: where to write the result; a new tensor if absent.
    :returns: [T, heads, value_head].
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    if query.shape[0] == 0:
        return out
    PagedAttentionCall(
        query=query.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        out=out,
        scale=scale,
        sliding_window=sliding_window,
    ).launch(query_ends, kv_lens)
    return out


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: list[int],
    kv_ends: list[int],
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention over keys that lie packed beside the queries, without a cache (encoders, first prefill,
    profiling).

    :param query: [T, heads, head]; key [S, kv_heads, head] and value [S, kv_heads, value_head] likewise
        packed.
    :param query_ends: cumulative query lengths, the last is T; kv_ends cumulative key lengths, the last is
        S.
    :param causal: align the last query with the last key and hide later keys; otherwise every key is seen.
    :returns: [T, heads, value_head].
    :raises ValueError: a window without ``causal``.
    """
    if sliding_window is not None and not causal:
        raise ValueError("sliding_window needs causal attention")
    if query.shape[0] == 0:
        return query.new_empty(*query.shape[:2], value.shape[2])
    visibility = _visibility(query.device, sliding_window) if causal else {"sparse_mode": NO_MASK}
    return _packed(query, key, value, query_ends, kv_ends, scale=scale, **visibility)[0]


def varlen_attention_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: list[int],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed tokens among themselves, for :func:`merge_attention` with that over other keys.

    :param query: [T, heads, head], at least one token; key [T, kv_heads, head] and value likewise.
    :returns: ([T, heads, value_head], the log-sum-exp of the scaled scores, float32 [T, heads]).
    """
    visibility = _visibility(query.device, None)
    out, lse = _packed(
        query, key, value, query_ends, query_ends, scale=scale, softmax_lse_flag=True, **visibility
    )
    return out, lse.squeeze(-1)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: list[int],
    kv_ends: list[int],
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator over packed queries and keys."""
    return torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        actual_seq_lengths=query_ends,
        actual_seq_lengths_kv=kv_ends,
        input_layout="TND",
        num_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        **arguments,
    )


def merge_attention(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of the keys by their log-sum-exp (npu_attention_update).

    :param outs: [T, heads, d] of each part, of one dtype, d at most 512; lses float32 [T, heads].
    :returns: (out [T, heads, d], lse [T, heads]) as over all keys.
    """
    while len(outs) > MOST_PARTS:  # the operator's limit: the first ones become one
        out, lse = merge_attention(outs[:MOST_PARTS], lses[:MOST_PARTS])
        outs, lses = [out, *outs[MOST_PARTS:]], [lse, *lses[MOST_PARTS:]]
    shape = outs[0].shape
    out, lse = torch_npu.npu_attention_update(
        [x.reshape(-1).contiguous() for x in lses], [x.reshape(-1, shape[2]) for x in outs], 1
    )
    return out.view(shape), lse.view(shape[:2])
