"""Scaled dot-product attention over packed queries, paged or packed keys: what the fused attention references
compute.

Scores, softmax and both sums are float32, the result is in the query's dtype. The query heads that share a
key head are laid out as rows of one matrix, so no key is repeated.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

TILE = 1024  # query rows for which one explicit mask is built
SHORTEST_BUCKET = 128  # keys; single-token requests up to here share one padded batch
CHUNK = 1 << 22  # elements of gathered keys that a padded batch holds in float32 at a time


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call, checked. B requests, T query tokens, N query heads, Nk key heads, head size D (values Dv)."""

    query: torch.Tensor  # [T, N, D]
    key: torch.Tensor  # [rows, Nk, D]: all tokens of the cache, or the packed keys
    value: torch.Tensor  # [rows, Nk, Dv]
    query_ends: tuple[int, ...]  # cumulative, the last is T
    kv_lengths: tuple[int, ...]
    block_table: torch.Tensor | None  # int32 [B, …]; None: keys are packed one request after the other
    block_size: int
    scale: float
    causal: bool  # the last query sees the last key
    window: int | None  # keys a query sees at most, itself included; None: all


def attend(
    call: Attention, want_lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the output [T, N, Dv], which is ``out`` if given, and the log-sum-exp of the scaled scores if
    wanted, float32 [T, N].

    A request without keys gives zeros.
    """
    tokens, heads, _ = call.query.shape
    singles, others, complete = _group(
        call.query_ends, call.kv_lengths, call.window, call.block_table is not None
    )
    if out is None:
        out = call.query.new_empty(tokens, heads, call.value.shape[2])
    if not complete:
        out.zero_()
    lse = torch.empty(tokens, heads, dtype=torch.float32) if want_lse else None
    for request, start in others:
        _attend_request(call, request, start, out, lse)
    for members in singles:
        _attend_singles(call, members, out, lse)
    return out, lse


Members = tuple[tuple[int, int], ...]  # (request, its first query token)


@lru_cache(maxsize=8)
def _group(
    query_ends: tuple[int, ...], kv_lengths: tuple[int, ...], window: int | None, paged: bool
) -> tuple[tuple[Members, ...], Members, bool]:
    """Requests with one query in batches of similar key count, the others, and whether none lacks keys."""
    singles: dict[int, list[tuple[int, int]]] = {}
    others = []
    complete, start = True, 0
    for request, (end, kv_length) in enumerate(zip(query_ends, kv_lengths, strict=True)):
        if end > start:
            if not kv_length:
                complete = False
            elif paged and end - start == 1:
                seen = min(kv_length, window or kv_length)
                bucket = max(seen - 1, SHORTEST_BUCKET - 1).bit_length()
                singles.setdefault(bucket, []).append((request, start))
            else:
                others.append((request, start))
        start = end
    return tuple(map(tuple, singles.values())), tuple(others), complete


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [b, h, rows, D] over key and value [b, h, keys, …]: the output and its log-sum-exp
    [b, h, rows].
    """
    if value.shape[-1] == query.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(scale)
    if causal:
        mask = _band_mask(query.shape[-2], key.shape[-2], None)
    if mask is not None:
        scores.add_(mask)
    output = torch.matmul(scores.softmax(-1), value.float())
    return output.to(query.dtype), scores.logsumexp(-1)


@lru_cache(maxsize=4)
def _band_mask(rows: int, keys: int, window: int | None) -> torch.Tensor:
    """The additive mask [rows, keys] of the last ``rows`` of ``keys`` positions: no later key, no key before
    the window.
    """
    position = torch.arange(keys - rows, keys).unsqueeze(1)
    key = torch.arange(keys)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(rows, keys).masked_fill_(hidden, float("-inf"))


def _request_rows(call: Attention, request: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [last − first, Nk, …] of one request at the positions first … last − 1."""
    if call.block_table is None:
        offset = sum(call.kv_lengths[:request])
        return call.key[offset + first : offset + last], call.value[offset + first : offset + last]
    position = torch.arange(first, last)
    block = call.block_table[request].index_select(0, position // call.block_size).long()
    _check_blocks(block, call.key.shape[0] // call.block_size)
    slots = block * call.block_size + position % call.block_size
    return call.key.index_select(0, slots), call.value.index_select(0, slots)


def _check_blocks(block: torch.Tensor, blocks: int) -> None:
    lowest, highest = torch.aminmax(block)
    if int(lowest) < 0 or int(highest) >= blocks:
        raise ValueError(f"block_table names a block outside 0 … {blocks - 1}")


def _attend_request(
    call: Attention, request: int, start: int, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """One request with any number of queries, in tiles where a mask is needed."""
    end, kv_length = call.query_ends[request], call.kv_lengths[request]
    key_heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    whole = call.window is None and (not call.causal or end - start == kv_length)
    step = end - start if whole else TILE
    for low in range(start, end, step):
        high = min(low + step, end)
        last = kv_length - (end - high) if call.causal else kv_length
        first = max(0, last - (high - low) - call.window + 1) if call.window is not None else 0
        mask = None if whole else _band_mask(high - low, last - first, call.window)
        key, value = _request_rows(call, request, first, last)
        # batch = key heads, heads = the group that shares a key: expand repeats no memory
        query = call.query[low:high].view(high - low, key_heads, group, -1).permute(1, 2, 0, 3)
        key = key.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        value = value.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        got, got_lse = _flash(query, key, value, call.scale, whole and call.causal, mask)
        out[low:high].view(high - low, key_heads, group, -1).copy_(got.permute(2, 0, 1, 3))
        if lse is not None:
            lse[low:high].view(high - low, key_heads, group).copy_(got_lse.permute(2, 0, 1))


@dataclass(frozen=True, kw_only=True)
class _SinglePlan:
    """Which rows of the cache a padded batch of single-token requests reads. b requests, S keys each."""

    rows: torch.Tensor  # int32 [b, Nk · S] into the cache seen as [tokens · Nk, D], key head by key head
    mask: torch.Tensor  # float32 [b · Nk, 1, S], −inf where a request has fewer than S keys
    longest: int  # S


@lru_cache(maxsize=8)
def _plan_singles(
    lengths: tuple[int, ...], window: int | None, block_size: int, tokens: int, key_heads: int, table: bytes
) -> _SinglePlan:
    """The layers of a model ask this with equal arguments, hence the cache; ``table`` is the block table as
    bytes.
    """
    blocks = torch.frombuffer(bytearray(table), dtype=torch.int32).view(len(lengths), -1)
    length = torch.tensor(lengths).unsqueeze(1)
    first = (length - window).clamp_(min=0) if window is not None else torch.zeros_like(length)
    longest = int((length - first).max())
    position = first + torch.arange(longest)
    beyond = position >= length
    position = torch.minimum(position, length - 1)
    block = blocks.gather(1, position // block_size).long()
    _check_blocks(block, tokens // block_size)
    slots = block * block_size + position % block_size
    assert tokens * key_heads < 2**31
    rows = (slots[:, None, :] * key_heads + torch.arange(key_heads)[None, :, None]).int()
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    mask = mask.repeat_interleave(key_heads, 0).unsqueeze(1)
    return _SinglePlan(rows=rows.view(len(lengths), -1), mask=mask, longest=longest)


def _attend_singles(call: Attention, members: Members, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Requests with one query token each, of similar length: their keys gathered into one padded batch."""
    assert call.block_table is not None
    requests = [request for request, _ in members]
    lengths = tuple(call.kv_lengths[request] for request in requests)
    needed = (max(lengths) - 1) // call.block_size + 1
    every = len(requests) == len(call.kv_lengths)
    table = (call.block_table if every else call.block_table[requests])[:, :needed]
    key_heads, size = call.key.shape[1:]
    plan = _plan_singles(
        lengths,
        call.window,
        call.block_size,
        call.key.shape[0],
        key_heads,
        table.contiguous().numpy().tobytes(),
    )
    start = members[0][1]
    adjacent = members[-1][1] - start == len(members) - 1
    where = slice(start, start + len(members)) if adjacent else torch.tensor([token for _, token in members])
    query = call.query[where].view(len(members), key_heads, -1, size)
    got = out[where].view(len(members), key_heads, -1, out.shape[2])  # a view if adjacent, else a copy
    got_lse = None if lse is None else lse[where].view(len(members), key_heads, -1)
    step = max(1, CHUNK // (plan.longest * key_heads * size))
    for low in range(0, len(members), step):
        part = slice(low, low + step)
        _attend_padded(call, plan, part, query[part], got[part], None if got_lse is None else got_lse[part])
    if not adjacent:
        out[where] = got.view(len(members), -1, out.shape[2])
        if lse is not None and got_lse is not None:
            lse[where] = got_lse.view(len(members), -1)


def _attend_padded(
    call: Attention,
    plan: _SinglePlan,
    part: slice,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Some requests of a plan: query [b, Nk, group, D] to out [b, Nk, group, Dv], in four matrix steps.

    Scores are float32; the probabilities are rounded to the query's dtype before they meet the values,
    whose sum is float32 again, as in the flash kernels.
    """
    rows = plan.rows[part].reshape(-1)
    batch, keys = query.shape[0] * query.shape[1], plan.longest
    group, size = query.shape[2:]
    mask = plan.mask[part.start * query.shape[1] : part.start * query.shape[1] + batch]
    key = call.key.view(-1, size).index_select(0, rows).view(batch, keys, size).float()
    scores = torch.baddbmm(
        mask, query.reshape(batch, group, size).float(), key.transpose(1, 2), alpha=call.scale
    )
    value = call.value.view(-1, out.shape[3]).index_select(0, rows).view(batch, keys, -1)
    torch.bmm(scores.softmax(-1).to(value.dtype), value, out=out.view(batch, group, -1))
    if lse is not None:
        torch.logsumexp(scores, -1, out=lse.view(batch, group))
