"""What the fused attention operators are given: checked, and turned into one computation.

Layout TND, packed or paged keys, grouped query heads, sparse mode 0 without a mask, 3 (causal, aligned to
the last key) and 4 (a band: ``pre_tokens`` keys before a query's own and none after it) pass; every other
argument must keep its default. The device takes fp16 and bf16; float32 is accepted here because it is what
proves that a model's tokens equal those of another implementation.

All layers of a model call with the same shapes and lengths, so the checks of those are cached.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .attention_math import Attention
from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype

NO_LIMIT = 2147483647
MASK_SIDE = 2048
MAX_GROUP = 64
MAX_BLOCK = 512
MAX_HEAD_SIZE = 512

V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"

_NONE_V1 = """
    pse_shift dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale
    antiquant_offset
    key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset query_padding_size
    kv_padding_size key_shared_prefix value_shared_prefix actual_shared_prefix_len query_rope key_rope
    key_rope_antiquant_scale
"""
_ZERO_V1 = "antiquant_mode key_antiquant_mode value_antiquant_mode"
_NONE_V2 = """
    query_rope key_rope pse_shift dequant_scale_query dequant_scale_key dequant_offset_key dequant_scale_value
    dequant_offset_value dequant_scale_key_rope quant_scale_out quant_offset_out quant_scale_p learnable_sink
    query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype
    value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype
    dequant_scale_key_rope_dtype out_dtype
"""
_ZERO_V2 = "query_quant_mode key_quant_mode value_quant_mode"

REFUSED: dict[str, dict[str, Any]] = {
    V1: {**dict.fromkeys(_NONE_V1.split()), **dict.fromkeys(_ZERO_V1.split(), 0)},
    V2: {**dict.fromkeys(_NONE_V2.split()), **dict.fromkeys(_ZERO_V2.split(), 0)},
}
# names of version 1 by those of version 2
RENAMED = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}
DEFAULTS: dict[str, Any] = {
    "atten_mask": None,
    "actual_seq_lengths": None,
    "actual_seq_lengths_kv": None,
    "block_table": None,
    "num_heads": 1,
    "num_key_value_heads": 0,
    "scale": 1.0,
    "pre_tokens": NO_LIMIT,
    "next_tokens": NO_LIMIT,
    "input_layout": "BSH",
    "sparse_mode": 0,
    "inner_precise": 0,
    "block_size": 0,
    "softmax_lse_flag": False,
}

_masks_seen: set[int] = set()


class _Tensor(NamedTuple):
    """What the checks look at in a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Tensor":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())


class _Static(NamedTuple):
    """One call without its data and its lengths."""

    op: str
    query: _Tensor
    key: _Tensor
    value: _Tensor
    table: _Tensor | None
    has_mask: bool
    heads: int
    key_heads: int
    layout: str
    block_size: int
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    inner_precise: int


def prepare(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> tuple[Attention, bool]:
    """Check everything. Returns the computation and whether the log-sum-exp is wanted."""
    named = {RENAMED.get(name, name): x for name, x in given.items()} if op == V2 else given
    refuse_arguments(op, named, REFUSED[op])
    a = {**DEFAULTS, **{name: x for name, x in named.items() if name not in REFUSED[op]}}
    if len(a) > len(DEFAULTS):
        raise NotImplementedError(f"{op}: no reference for {', '.join(sorted(a.keys() - DEFAULTS.keys()))}")
    table, mask = a["block_table"], a["atten_mask"]
    heads, key_heads = a["num_heads"], a["num_key_value_heads"] or a["num_heads"]
    static = _Static(
        op=op,
        query=_Tensor.of(query),
        key=_Tensor.of(key),
        value=_Tensor.of(value),
        table=None if table is None else _Tensor.of(table),
        has_mask=mask is not None,
        heads=heads,
        key_heads=key_heads,
        layout=a["input_layout"],
        block_size=a["block_size"],
        sparse_mode=a["sparse_mode"],
        pre_tokens=a["pre_tokens"],
        next_tokens=a["next_tokens"],
        inner_precise=a["inner_precise"],
    )
    causal, window = _check_static(static)
    if causal:
        _check_mask(op, mask)
    ends = _as_tuple(op, a["actual_seq_lengths"], "actual_seq_lengths")
    kv = _as_tuple(op, a["actual_seq_lengths_kv"], "actual_seq_lengths_kv")
    call = Attention(
        query=query,
        key=key.view(-1, key_heads, static.key.shape[-1] // (1 if table is None else key_heads)),
        value=value.view(-1, key_heads, static.value.shape[-1] // (1 if table is None else key_heads)),
        query_ends=ends,
        kv_lengths=_check_lengths(static, ends, kv, causal, a["softmax_lse_flag"]),
        block_table=table,
        block_size=a["block_size"],
        scale=a["scale"],
        causal=causal,
        window=window,
    )
    return call, a["softmax_lse_flag"]


@lru_cache(maxsize=64)
def _check_static(call: _Static) -> tuple[bool, int | None]:
    """Dtypes, layouts, heads and sparse mode. Returns (causal, window)."""
    op, query = call.op, call.query
    if call.layout != "TND":
        raise NotImplementedError(f"{op}: no reference for input_layout={call.layout!r} (only 'TND')")
    require(query.dtype in FLOATS, op, f"query is {query.dtype}, allowed are {', '.join(map(str, FLOATS))}")
    for name, x in (("query", query), ("key", call.key), ("value", call.value)):
        require(
            x.dtype == query.dtype, op, f"{name} is {x.dtype}, query is {query.dtype}; they must be equal"
        )
        require(x.contiguous, op, f"{name} is not contiguous")
    require(
        len(query.shape) == 3 and query.shape[1] == call.heads,
        op,
        f"query {query.shape} must be [T, num_heads={call.heads}, head]",
    )
    require(
        call.heads % call.key_heads == 0 and call.heads // call.key_heads <= MAX_GROUP,
        op,
        f"num_heads {call.heads} must be a multiple of num_key_value_heads {call.key_heads}, "
        f"at most {MAX_GROUP} times",
    )
    require(call.inner_precise in (0, 1), op, f"inner_precise is {call.inner_precise}, allowed are 0 and 1")
    (_check_packed if call.table is None else _check_pages)(call)
    value_size = call.value.shape[2] // (1 if call.table is None else call.key_heads)
    for name, size in (("query", query.shape[2]), ("value", value_size)):
        require(
            size % 16 == 0 and 0 < size <= MAX_HEAD_SIZE,
            op,
            f"the head size of {name} is {size}, it must be a multiple of 16 up to {MAX_HEAD_SIZE}",
        )
    return _check_sparsity(call)


def _check_packed(call: _Static) -> None:
    op, size = call.op, call.query.shape[2]
    require(call.block_size == 0, op, "block_size is given without block_table")
    for name, x in (("key", call.key), ("value", call.value)):
        fits = len(x.shape) == 3 and x.shape[1] == call.key_heads and x.shape[0] == call.key.shape[0]
        require(fits, op, f"{name} {x.shape} must be [{call.key.shape[0]}, {call.key_heads}, head]")
    require(call.key.shape[2] == size, op, f"the head size of key is {call.key.shape[2]}, of query {size}")


def _check_pages(call: _Static) -> None:
    op, size, heads = call.op, call.block_size, call.key_heads
    require(
        0 < size <= MAX_BLOCK and size % 16 == 0,
        op,
        f"block_size is {size}, it must be a multiple of 16 up to {MAX_BLOCK}",
    )
    for name, x in (("key", call.key), ("value", call.value)):
        require(
            len(x.shape) == 3 and x.shape[:2] == (call.key.shape[0], size) and x.shape[2] % heads == 0,
            op,
            f"{name} {x.shape} must be [{call.key.shape[0]}, {size}, {heads}·head], the only page layout",
        )
    row = call.key.shape[2]
    require(row <= 65535, op, f"key heads times head size is {row}, at most 65,535 is allowed")
    require(
        row == heads * call.query.shape[2],
        op,
        f"the head size of key is {row // heads}, of query {call.query.shape[2]}",
    )
    assert call.table is not None
    require(call.table.dtype == torch.int32, op, f"block_table is {call.table.dtype}, allowed is torch.int32")
    require(call.table.contiguous, op, "block_table is not contiguous")
    require(len(call.table.shape) == 2, op, f"block_table {call.table.shape} must have 2 dimensions")


def _check_sparsity(call: _Static) -> tuple[bool, int | None]:
    """(causal, window) of the sparse mode. The band counts ``pre_tokens`` keys before the query's own."""
    op, mode = call.op, call.sparse_mode
    if mode not in (0, 3, 4):
        raise NotImplementedError(f"{op}: no reference for sparse_mode={mode} (only 0, 3 and 4)")
    if mode == 0:
        if call.has_mask:
            raise NotImplementedError(f"{op}: no reference for atten_mask in sparse mode 0")
        return False, None
    if mode == 3:
        return True, None
    if call.next_tokens != 0:
        raise NotImplementedError(f"{op}: no reference for next_tokens={call.next_tokens} (only 0)")
    require(call.pre_tokens >= 0, op, f"pre_tokens is {call.pre_tokens}, it must not be negative")
    return True, call.pre_tokens + 1


def _check_mask(op: str, mask: torch.Tensor | None) -> None:
    """The compressed causal mask, 1 above the diagonal. Its whole content is read once per address."""
    require(mask is not None, op, "atten_mask is None, sparse modes 3 and 4 need the 2048 × 2048 causal mask")
    assert mask is not None
    require_dtype(op, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8))
    fits = mask.dim() in (2, 3, 4) and mask.shape[-1] == MASK_SIDE and mask.numel() == MASK_SIDE**2
    require(fits, op, "atten_mask must be 2048 × 2048")
    require_contiguous(op, atten_mask=mask)
    square = mask.view(MASK_SIDE, MASK_SIDE)
    if mask.data_ptr() in _masks_seen and square[0, 1].item():  # the memory was not cleared or reused since
        return
    upper = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool).triu_(1)
    require(torch.equal(square.bool(), upper), op, "atten_mask must be 1 above the diagonal and 0 elsewhere")
    if len(_masks_seen) > 64:
        _masks_seen.clear()
    _masks_seen.add(mask.data_ptr())


def _as_tuple(op: str, given: Sequence[int] | None, name: str) -> tuple[int, ...]:
    if given is None:
        raise ValueError(f"{op}: {name} is None, layout TND needs it")
    lengths = tuple(given)
    if min(lengths, default=0) < 0:
        raise ValueError(f"{op}: {name} holds a negative number: {list(lengths)}")
    return lengths


def _differences(op: str, ends: tuple[int, ...], total: int, name: str) -> tuple[int, ...]:
    """The single lengths of cumulative ``ends``, which must grow and end at ``total``."""
    single = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
    require(min(single, default=0) >= 0, op, f"{name} must not fall: {list(ends)}")
    last = ends[-1] if ends else 0
    require(last == total, op, f"{name} ends at {last}, not at {total} tokens")
    return single


@lru_cache(maxsize=64)
def _check_lengths(
    call: _Static, ends: tuple[int, ...], kv: tuple[int, ...], causal: bool, want_lse: bool
) -> tuple[int, ...]:
    """The lists of lengths against the shapes and each other. Returns the keys of each request."""
    op = call.op
    query_lengths = _differences(op, ends, call.query.shape[0], "actual_seq_lengths")
    require(len(kv) == len(ends), op, f"{len(ends)} query lengths but {len(kv)} key lengths")
    if call.table is None:
        kv = _differences(op, kv, call.key.shape[0], "actual_seq_lengths_kv")
    else:
        rows, columns = call.table.shape
        require(rows == len(kv), op, f"block_table has {rows} rows for {len(kv)} requests")
        needed = -(-max(kv, default=0) // call.block_size)
        require(
            columns >= needed,
            op,
            f"block_table has {columns} columns, the longest request needs {needed} blocks",
        )
    for request, (q_length, kv_length) in enumerate(zip(query_lengths, kv, strict=True)):
        require(
            not causal or kv_length >= q_length or kv_length == 0,
            op,
            f"request {request} has {q_length} queries but only {kv_length} keys",
        )
    require(not want_lse or all(kv), op, "a request has no keys: its log-sum-exp is not defined")
    return kv
