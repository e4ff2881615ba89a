"""What the fused attention operators are given: checked, and turned into one computation.

Layout TND, packed or paged keys, grouped query heads, sparse mode 0 without a mask, 3 (causal, aligned to
the last key) and 4 (a band: ``pre_tokens`` keys before a query's own and none after it) pass; every other
argument must keep its default. The device takes fp16 and bf16; float32 is accepted here because it is what
proves that a model's tokens equal those of another implementation.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .attention_math import Attention
from .checks import FLOATS, refuse_arguments, require, require_contiguous, require_dtype

NO_LIMIT = 2147483647
MASK_SIDE = 2048
MAX_GROUP = 64
MAX_BLOCK = 512

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

_masks_seen: dict[int, bool] = {}


def _check_mask(op: str, mask: torch.Tensor | None) -> None:
    """The compressed causal mask: 2048 × 2048, true above the diagonal. Its whole content is read once per
    address.
    """
    require(mask is not None, op, "atten_mask is None, sparse modes 3 and 4 need the 2048 × 2048 causal mask")
    assert mask is not None
    require_dtype(op, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8))
    fits = tuple(mask.shape)[-2:] == (MASK_SIDE, MASK_SIDE) and mask.numel() == MASK_SIDE**2
    require(fits and mask.dim() <= 4, op, f"atten_mask is {tuple(mask.shape)}, it must be 2048 × 2048")
    require_contiguous(op, atten_mask=mask)
    address = mask.data_ptr()
    square = mask.view(MASK_SIDE, MASK_SIDE)
    corner = square[-2:, -2:].tolist()
    if _masks_seen.get(address) and corner == [[0, 1], [0, 0]]:
        return
    upper = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool).triu_(1)
    require(torch.equal(square.bool(), upper), op, "atten_mask must be 1 above the diagonal and 0 elsewhere")
    if len(_masks_seen) > 16:
        _masks_seen.clear()
    _masks_seen[address] = True


def _lengths(op: str, given: Sequence[int] | None, name: str) -> tuple[int, ...]:
    require(given is not None, op, f"{name} is None, layout TND needs it")
    assert given is not None
    lengths = tuple(int(n) for n in given)
    require(all(n >= 0 for n in lengths), op, f"{name} holds a negative number")
    return lengths


def _cumulative(op: str, ends: tuple[int, ...], total: int, name: str) -> tuple[int, ...]:
    """The single lengths of cumulative ``ends``, which must grow and end at ``total``."""
    single = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
    require(all(n >= 0 for n in single), op, f"{name} must not fall: {list(ends)}")
    require(
        (ends[-1] if ends else 0) == total,
        op,
        f"{name} ends at {ends[-1] if ends else 0}, not at {total} tokens",
    )
    return single


def _keys(
    op: str, key: torch.Tensor, value: torch.Tensor, heads: int, a: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [rows, heads, size], from pages ``[blocks, block, heads·size]`` or packed ``[T,
    heads, size]``.
    """
    if a["block_table"] is None:
        require(a["block_size"] == 0, op, "block_size is given without block_table")
        for name, x in (("key", key), ("value", value)):
            require(
                x.dim() == 3 and x.shape[1] == heads,
                op,
                f"{name} {tuple(x.shape)} must be [T, {heads}, head]",
            )
        require(key.shape[0] == value.shape[0], op, "key and value differ in tokens")
        return key, value
    size = a["block_size"]
    require(
        0 < size <= MAX_BLOCK and size % 16 == 0,
        op,
        f"block_size is {size}, it must be a multiple of 16 up to {MAX_BLOCK}",
    )
    for name, x in (("key", key), ("value", value)):
        require(
            x.dim() == 3 and x.shape[1] == size and x.shape[2] % heads == 0,
            op,
            f"{name} {tuple(x.shape)} must be [blocks, {size}, {heads}·head], the only page layout",
        )
    require(key.shape[0] == value.shape[0], op, "key and value differ in blocks")
    require(
        key.shape[2] <= 65535, op, f"key heads times head size is {key.shape[2]}, at most 65,535 is allowed"
    )
    return key.view(-1, heads, key.shape[2] // heads), value.view(-1, heads, value.shape[2] // heads)


def _check_tensors(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, a: dict[str, Any]
) -> int:
    """Checks of dtype, layout and heads. Returns the number of key heads."""
    layout = a["input_layout"]
    if layout != "TND":
        raise NotImplementedError(f"{op}: no reference for input_layout={layout!r} (only 'TND')")
    require_dtype(op, "query", query, FLOATS)
    for name, x in (("key", key), ("value", value)):
        require(
            x.dtype == query.dtype, op, f"{name} is {x.dtype}, query is {query.dtype}; they must be equal"
        )
    require_contiguous(op, query=query, key=key, value=value)
    heads, key_heads = a["num_heads"], a["num_key_value_heads"] or a["num_heads"]
    require(
        query.dim() == 3 and query.shape[1] == heads,
        op,
        f"query {tuple(query.shape)} must be [T, num_heads={heads}, head]",
    )
    require(
        heads % key_heads == 0 and heads // key_heads <= MAX_GROUP,
        op,
        f"num_heads {heads} must be a multiple of num_key_value_heads {key_heads}, at most {MAX_GROUP} times",
    )
    require(a["inner_precise"] in (0, 1), op, f"inner_precise is {a['inner_precise']}, allowed are 0 and 1")
    return key_heads


def _sparsity(op: str, a: dict[str, Any]) -> tuple[bool, int | None]:
    """(causal, window) of the sparse mode. The band counts ``pre_tokens`` keys before the query's own."""
    mode, pre, following = a["sparse_mode"], a["pre_tokens"], a["next_tokens"]
    if mode not in (0, 3, 4):
        raise NotImplementedError(f"{op}: no reference for sparse_mode={mode} (only 0, 3 and 4)")
    if mode == 0:
        if a["atten_mask"] is not None:
            raise NotImplementedError(f"{op}: no reference for atten_mask in sparse mode 0")
        return False, None
    _check_mask(op, a["atten_mask"])
    if mode == 3:
        return True, None
    require(following == 0, op, f"next_tokens is {following}, sparse mode 4 has a reference for 0 only")
    require(pre >= 0, op, f"pre_tokens is {pre}, it must not be negative")
    return True, pre + 1


def prepare(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> tuple[Attention, bool]:
    """Check everything. Returns the computation and whether the log-sum-exp is wanted."""
    refused = REFUSED[op]
    named = {RENAMED.get(name, name): x for name, x in given.items()} if op == V2 else given
    refuse_arguments(op, {**refused, **named}, refused)
    unknown = named.keys() - refused.keys() - DEFAULTS.keys()
    if unknown:
        raise NotImplementedError(f"{op}: no reference for {', '.join(sorted(unknown))}")
    a = {**DEFAULTS, **named}
    key_heads = _check_tensors(op, query, key, value, a)
    rows, value_rows = _keys(op, key, value, key_heads, a)
    require(
        rows.shape[2] == query.shape[2],
        op,
        f"the head size of key is {rows.shape[2]}, that of query {query.shape[2]}",
    )
    causal, window = _sparsity(op, a)
    ends = _lengths(op, a["actual_seq_lengths"], "actual_seq_lengths")
    query_lengths = _cumulative(op, ends, query.shape[0], "actual_seq_lengths")
    kv = _lengths(op, a["actual_seq_lengths_kv"], "actual_seq_lengths_kv")
    require(len(kv) == len(ends), op, f"{len(ends)} query lengths but {len(kv)} key lengths")
    table = a["block_table"]
    if table is None:
        kv = _cumulative(op, kv, key.shape[0], "actual_seq_lengths_kv")
    else:
        _check_table(op, table, kv, a["block_size"])
    if causal:
        for request, (q_length, kv_length) in enumerate(zip(query_lengths, kv, strict=True)):
            require(
                kv_length >= q_length or kv_length == 0,
                op,
                f"request {request} has {q_length} queries but only {kv_length} keys",
            )
    if a["softmax_lse_flag"]:
        require(all(kv), op, "a request has no keys: its log-sum-exp is not defined")
    call = Attention(
        query=query,
        key=rows,
        value=value_rows,
        query_ends=ends,
        kv_lengths=kv,
        block_table=table,
        block_size=a["block_size"],
        scale=a["scale"],
        causal=causal,
        window=window,
    )
    return call, a["softmax_lse_flag"]


def _check_table(op: str, table: torch.Tensor, kv: tuple[int, ...], block_size: int) -> None:
    require_dtype(op, "block_table", table, (torch.int32,))
    require(
        table.dim() == 2 and table.shape[0] == len(kv),
        op,
        f"block_table {tuple(table.shape)} must be [{len(kv)}, blocks]",
    )
    require_contiguous(op, block_table=table)
    needed = -(-max(kv, default=0) // block_size)
    require(
        table.shape[1] >= needed,
        op,
        f"block_table has {table.shape[1]} columns, the longest request needs {needed} blocks",
    )
