"""Reference of the fused attention over a paged latent cache: MLA in its absorbed form.

Version 2 of the fused operator computes it when it is given ``query_rope`` and ``key_rope``: all heads share
one key, a latent of 512 elements followed by a rotary part of 64, and the latent is the value too. Constraints
as in torch_npu's documentation of ``npu_fused_infer_attention_score_v2`` for a query of 512: layout TND, pages
of 16 or 128 tokens, 1, 2, 4 … 128 heads, 1 to 16 queries of a request; no mask (sparse mode 0) where every
request has one query, else the causal one (sparse mode 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .attention_arguments import DEFAULTS, REFUSED, RENAMED, V2, _check_mask
from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype
from .mla import LATENT, ROPE

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS = (16, 128)
MOST_QUERIES = 16


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """One call, checked. T query tokens, N heads."""

    query: torch.Tensor  # [T, N, 512]
    query_rope: torch.Tensor  # [T, N, 64]
    latents: torch.Tensor  # [slots, 512]
    ropes: torch.Tensor  # [slots, 64]
    query_ends: list[int]
    kv_lengths: list[int]
    block_table: torch.Tensor
    block_size: int
    scale: float


def is_latent(op: str, given: dict[str, Any]) -> bool:
    """Whether a call of the fused operator is one over latents; version 1 has no reference for that."""
    return op == V2 and (given.get("query_rope") is not None or given.get("key_rope") is not None)


def prepare_latent(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> tuple[LatentAttention, bool]:
    """Check everything that the device documents. Returns the call and whether the log-sum-exp is wanted."""
    named = {RENAMED.get(name, name): x for name, x in given.items()}
    query_rope, key_rope = named.pop("query_rope", None), named.pop("key_rope", None)
    if query_rope is None or key_rope is None:
        raise ValueError(f"{op}: query_rope and key_rope must be given together")
    refuse_arguments(op, named, REFUSED[op] | {"inner_precise": 0})
    a = {**DEFAULTS, **{name: x for name, x in named.items() if name not in REFUSED[op]}}
    if a["input_layout"] != "TND":
        raise NotImplementedError(f"{op}: no reference for input_layout={a['input_layout']!r} (only 'TND')")
    _check_heads(op, query, query_rope, a)
    _check_pages(op, query, key, value, key_rope, a["block_size"])
    ends, lengths = _check_lengths(op, query.shape[0], a)
    call = LatentAttention(
        query=query,
        query_rope=query_rope,
        latents=key.view(-1, LATENT),
        ropes=key_rope.view(-1, ROPE),
        query_ends=ends,
        kv_lengths=lengths,
        block_table=a["block_table"],
        block_size=a["block_size"],
        scale=a["scale"],
    )
    return call, a["softmax_lse_flag"]


def _check_heads(op: str, query: torch.Tensor, query_rope: torch.Tensor, a: dict[str, Any]) -> None:
    heads = a["num_heads"]
    require_dtype(op, "query", query, FLOATS)
    require(heads in HEADS, op, f"num_query_heads is {heads}, with query_rope allowed are {HEADS}")
    require(a["num_key_value_heads"] == 1, op, f"num_key_value_heads is {a['num_key_value_heads']}, not 1")
    for name, x, width in (("query", query, LATENT), ("query_rope", query_rope, ROPE)):
        require(x.dtype == query.dtype, op, f"{name} is {x.dtype}, query is {query.dtype}")
        wanted = (query.shape[0], heads, width)
        require(tuple(x.shape) == wanted, op, f"{name} {tuple(x.shape)} must be {wanted}")
        require_contiguous(op, **{name: x})
    require(query.shape[0] > 0, op, "query is empty")


def _check_pages(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_rope: torch.Tensor, block: int
) -> None:
    require(block in BLOCKS, op, f"block_size is {block}, with query_rope allowed are {BLOCKS}")
    for name, x, width in (("key", key, LATENT), ("value", value, LATENT), ("key_rope", key_rope, ROPE)):
        require(x.dtype == query.dtype, op, f"{name} is {x.dtype}, query is {query.dtype}")
        wanted = (key.shape[0], block, width)
        require(tuple(x.shape) == wanted, op, f"{name} {tuple(x.shape)} must be {wanted}")
        require_contiguous(op, **{name: x})
    require(value.data_ptr() == key.data_ptr(), op, "value must be the key's memory: both are the latents")


def _check_lengths(op: str, tokens: int, a: dict[str, Any]) -> tuple[list[int], list[int]]:
    ends, lengths = _host_list(op, a, "actual_seq_lengths"), _host_list(op, a, "actual_seq_lengths_kv")
    table = a["block_table"]
    require(table is not None, op, "block_table is None, with query_rope pages are needed")
    require_dtype(op, "block_table", table, (torch.int32,))
    require_contiguous(op, block_table=table)
    require(len(ends) == len(lengths), op, f"{len(ends)} query lengths but {len(lengths)} key lengths")
    fits = table.dim() == 2 and table.shape[0] == len(ends)
    require(fits, op, f"block_table {tuple(table.shape)} must have a row for each of {len(ends)} requests")
    queries = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    require(bool(ends) and ends[-1] == tokens, op, f"actual_seq_qlen must end at {tokens} tokens: {ends}")
    fits = all(1 <= count <= MOST_QUERIES for count in queries)
    require(fits, op, f"a request has {queries} queries, 1 to {MOST_QUERIES} are allowed")
    for request, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        require(length >= count, op, f"request {request} has {count} queries but only {length} keys")
    needed = -(-max(lengths) // a["block_size"])
    require(table.shape[1] >= needed, op, f"block_table has {table.shape[1]} columns, {needed} are needed")
    if max(queries) == 1:
        fits = a["sparse_mode"] == 0 and a["atten_mask"] is None
        require(fits, op, "with one query of each request sparse_mode must be 0 and atten_mask None")
    else:
        require(a["sparse_mode"] == 3, op, f"sparse_mode is {a['sparse_mode']}, with several queries it is 3")
        _check_mask(op, a["atten_mask"])
    return ends, lengths


def _host_list(op: str, a: dict[str, Any], name: str) -> list[int]:
    given: Sequence[int] | None = a[name]
    require(given is not None, op, f"{name} is None, layout TND needs it")
    assert given is not None
    return [int(x) for x in given]


def attend_latents(
    call: LatentAttention, want_lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the output [T, N, 512] in the query's dtype, which is ``out`` if given, and the log-sum-exp of the
    scaled scores if wanted, float32 [T, N, 1].

    softmax(scale · (q · latentᵀ + q_rope · ropeᵀ)) · latent of each request, the last query aligned with the
    last key. Scores and sums are float32.
    """
    if out is None:
        out = torch.empty_like(call.query)
    lse = call.query.new_empty(*call.query.shape[:2], 1, dtype=torch.float32) if want_lse else None
    blocks, start = call.latents.shape[0] // call.block_size, 0
    for request, (end, length) in enumerate(zip(call.query_ends, call.kv_lengths, strict=True)):
        place = torch.arange(length)
        page = call.block_table[request].long().index_select(0, place // call.block_size)
        lowest, highest = torch.aminmax(page)
        if int(lowest) < 0 or int(highest) >= blocks:
            raise ValueError(f"block_table names a block outside 0 … {blocks - 1}")
        slots = page * call.block_size + place % call.block_size
        latent = call.latents.index_select(0, slots).float()
        query, rope = call.query[start:end].flatten(0, 1).float(), call.query_rope[start:end].flatten(0, 1)
        scores = query @ latent.T + rope.float() @ call.ropes.index_select(0, slots).float().T
        scores = scores.mul_(call.scale).view(end - start, -1, length)
        if end - start > 1:
            last = torch.arange(length - (end - start), length).view(-1, 1, 1)
            scores.masked_fill_(place.view(1, 1, -1) > last, float("-inf"))
        out[start:end] = scores.softmax(-1) @ latent
        if lse is not None:
            lse[start:end] = scores.logsumexp(-1, keepdim=True)
        start = end
    return out, lse
