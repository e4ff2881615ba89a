"""Log probabilities from VllmEngine messages back to the arrays that vLLM's output processor reads.

vLLM's rows are ``[chosen, 1st, 2nd, ... k-th]``: the chosen token in front, then the k most likely in order
(the chosen one again at its place when it is among them). The messages hold each token once with the chosen
one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

Row = tuple[list[int], list[float], int]
"""Token ids and log probabilities of one position (both k + 1 long), and the chosen token's rank."""


def _ranked_row(ids: list[int], values: list[float], wanted: int) -> Row:
    """A row from an engine that tells ranks: all alternatives, chosen first, then the rank as one more id."""
    rank = ids.pop()
    others, other_values = ids[1:], values[1:]
    if rank > 0 and (wanted < 0 or len(ids) <= wanted):  # the chosen token is among the most likely
        others.insert(rank - 1, ids[0])
        other_values.insert(rank - 1, values[0])
    return [ids[0], *others], [values[0], *other_values], rank


def _stock_row(chosen: int, value: float, ids: list[int], values: list[float], wanted: int) -> Row:
    """A row from a stock engine: the rank is rebuilt from the order, exact when the chosen token is among
    them."""
    if ids and ids[0] == chosen:
        ids, values = ids[1:], values[1:]
    place = sum(other > value for other in values)
    rank = place + 1
    if wanted < 0 or place < wanted:
        ids, values = [*ids[:place], chosen, *ids[place:]], [*values[:place], value, *values[place:]]
    if wanted >= 0:
        ids, values = ids[:wanted], values[:wanted]
    return [chosen, *ids], [value, *values], rank


def _rows(
    message: Any, chosen: Sequence[int], values: Sequence[float], wanted: int, ranked: bool
) -> list[Row]:
    rows = []
    for index, (token_id, value) in enumerate(zip(chosen, values, strict=True)):
        top = message.top_logprobs[index] if index < len(message.top_logprobs) else None
        top_ids = list(top.token_ids) if top is not None else []
        top_values = list(top.values) if top is not None else []
        if ranked and top_ids:
            rows.append(_ranked_row(top_ids, top_values, wanted))
        else:
            rows.append(_stock_row(token_id, value, top_ids, top_values, wanted))
    return rows


def _square(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays [positions, width]; a short row repeats its first entry, which a map by token id absorbs."""
    width = max(len(ids) for ids, _, _ in rows)
    ids = np.array([row[0] + row[0][:1] * (width - len(row[0])) for row in rows], dtype=np.int64)
    values = np.array([row[1] + row[1][:1] * (width - len(row[1])) for row in rows], dtype=np.float32)
    return ids, values, np.array([rank for _, _, rank in rows], dtype=np.int64)


def output_logprobs(message: Any, wanted: int, ranked: bool) -> LogprobsLists | None:
    """An ``OutputLogProbs`` as arrays of ``wanted + 1`` columns (-1: the whole vocabulary); None when it is
    empty."""
    if not message.token_ids:
        return None
    rows = _rows(message, message.token_ids, message.token_logprobs, wanted, ranked)
    return LogprobsLists(*_square(rows), None)


def prompt_logprobs(message: Any, wanted: int, ranked: bool) -> LogprobsTensors | None:
    """An ``InputLogProbs`` as tensors for the prompt tokens after the first; None when there are none."""
    if len(message.token_ids) < 2:
        return None
    values = [entry.value for entry in message.token_logprobs]
    rows = _rows(message, message.token_ids, values, wanted, ranked)[1:]
    ids, logprobs, ranks = _square(rows)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(ranks))
