"""Scaled dot-product attention over packed queries, paged or packed keys: what the fused attention references compute.

Scores, softmax and both sums are float32, the result is rounded once to the query's dtype (PyTorch's flash kernel
for CPUs does so). The query heads that share a key head are laid out as rows of one matrix, so no key is repeated.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

TILE = 1024  # query rows for which one explicit mask is built
SHORTEST_BUCKET = 64  # keys; single-token requests up to here share one padded batch


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


def attend(call: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [T, N, Dv] and the log-sum-exp of the scaled scores, float32 [T, N].

    A request without keys gives zeros (and −inf).
    """
    tokens, heads, _ = call.query.shape
    out = call.query.new_zeros(tokens, heads, call.value.shape[2])
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32)
    start = 0
    singles: dict[int, list[tuple[int, int]]] = {}  # bucket → (request, its query token)
    for request, (end, kv_length) in enumerate(zip(call.query_ends, call.kv_lengths, strict=True)):
        if end - start == 1 and kv_length and call.block_table is not None:
            seen = min(kv_length, call.window or kv_length)
            bucket = max(seen - 1, SHORTEST_BUCKET - 1).bit_length()
            singles.setdefault(bucket, []).append((request, start))
        elif end > start and kv_length:
            _attend_request(call, request, start, out, lse)
        start = end
    for members in singles.values():
        _attend_singles(call, members, out, lse)
    return out, lse


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [b, h, rows, D] over key and value [b, h, keys, …]: the output and its log-sum-exp [b, h, rows]."""
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


@lru_cache(maxsize=8)
def _band_mask(rows: int, keys: int, window: int | None) -> torch.Tensor:
    """The additive mask [rows, keys] of the last ``rows`` of ``keys`` positions: no later key, no key before the window."""
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
    block = call.block_table[request].index_select(0, position // call.block_size)
    slots = block.long() * call.block_size + position % call.block_size
    return call.key.index_select(0, slots), call.value.index_select(0, slots)


def _attend_request(call: Attention, request: int, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
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
        lse[low:high].view(high - low, key_heads, group).copy_(got_lse.permute(2, 0, 1))


@lru_cache(maxsize=8)
def _single_plan(
    lengths: tuple[int, ...], window: int | None, block_size: int, rows: int, table: bytes
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Which cache rows a padded batch of single-token requests reads: (slots [B·S], additive mask [B, 1, 1, S], S).

    The layers of a model ask this with equal arguments, hence the cache; ``table`` is the block table as bytes.
    """
    blocks = torch.frombuffer(bytearray(table), dtype=torch.int32).view(len(lengths), -1)
    length = torch.tensor(lengths).unsqueeze(1)
    first = (length - window).clamp_(min=0) if window is not None else torch.zeros_like(length)
    longest = int((length - first).max())
    position = first + torch.arange(longest)
    beyond = position >= length
    position = torch.minimum(position, length - 1)
    block = blocks.gather(1, position // block_size).long()
    if int(block.min()) < 0 or int(block.max()) * block_size >= rows:
        raise ValueError(f"block_table names a block outside 0 … {rows // block_size - 1}")
    slots = (block * block_size + position % block_size).view(-1)
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None, :] if beyond.any() else None
    return slots, mask, longest


def _attend_singles(
    call: Attention, members: list[tuple[int, int]], out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Requests with one query token each, of similar length: their keys gathered into one padded batch."""
    assert call.block_table is not None
    requests = [request for request, _ in members]
    lengths = tuple(call.kv_lengths[request] for request in requests)
    needed = (max(lengths) - 1) // call.block_size + 1
    every = requests == list(range(len(call.kv_lengths)))
    table = call.block_table if every else call.block_table[requests]
    table_bytes = table[:, :needed].contiguous().numpy().tobytes()
    slots, mask, longest = _single_plan(lengths, call.window, call.block_size, call.key.shape[0], table_bytes)
    count, key_heads, group = len(members), call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    key = call.key.index_select(0, slots).view(count, longest, key_heads, -1).transpose(1, 2)
    value = call.value.index_select(0, slots).view(count, longest, key_heads, -1).transpose(1, 2)
    first = members[0][1]
    adjacent = members[-1][1] - first == count - 1
    where = slice(first, first + count) if adjacent else torch.tensor([token for _, token in members])
    query = call.query[where].view(count, key_heads, group, -1)
    got, got_lse = _flash(query, key, value, call.scale, False, mask)
    if adjacent:
        out[where].view(count, key_heads, group, -1).copy_(got)
        lse[where].view(count, key_heads, group).copy_(got_lse)
    else:
        out[where] = got.reshape(count, -1, out.shape[2])
        lse[where] = got_lse.reshape(count, -1)
