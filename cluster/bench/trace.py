"""Request traces: when requests came, how long they were, and which of them share a beginning.

Two formats are read. JSON lines of ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}`` as the
Mooncake traces have them (FAST'25): equal leading ids mean equal prefix blocks of 512 tokens. CSV with
``TIMESTAMP,ContextTokens,GeneratedTokens`` as the Azure traces of 2023 have it: lengths only, so no two prompts
share anything.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

_LONGEST = 1 << 27  # tokens of a request
TRACE_BLOCK = 512  # tokens that one hash id stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request: seconds since the trace's beginning, tokens, and the ids of its prefix blocks."""

    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    @property
    def session(self) -> str:
        """What tells its conversation from others: its first block that is not everybody's. "" without ids."""
        return str(self.hash_ids[1]) if len(self.hash_ids) > 1 else ""


def read(path: Path) -> list[TraceRequest]:
    """The requests of a trace file in the order of their times; ValueError names file and line."""
    if not path.is_file():
        raise ValueError(f"{path}: no such trace")
    rows = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    try:
        requests = sorted(rows, key=lambda request: request.at)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a trace: it is not UTF-8 text") from error
    if not requests:
        raise ValueError(f"{path}: the trace has no requests")
    first = requests[0].at
    return [replace(request, at=request.at - first) for request in requests]


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield TraceRequest(
                    at=_time(float(row["timestamp"]) / 1000),
                    prompt_tokens=_positive(row["input_length"]),
                    output_tokens=_positive(row["output_length"]),
                    hash_ids=tuple(int(item) for item in row.get("hash_ids", ())),
                )
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: not a request of a trace: {_why(error)}") from error


def _azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
                yield TraceRequest(
                    at=moment.timestamp(),
                    prompt_tokens=_positive(row["ContextTokens"]),
                    output_tokens=_positive(row["GeneratedTokens"]),
                )
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: not a request of a trace: {_why(error)}") from error


def _why(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _positive(value: object) -> int:
    number = int(str(value))
    if not 1 <= number <= _LONGEST:
        raise ValueError(f"a length must be 1 to {_LONGEST:,}, got {number}")
    return number


def _time(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"a time must be a number, got {seconds}")
    return seconds


def tokens(request: TraceRequest, number: int, vocabulary: int) -> list[int]:
    """Token ids for a request: each hash id always stands for the same block, all else is its own.

    ``number`` is the request's place in the trace; ids are in [0, ``vocabulary``).
    """
    made: list[int] = []
    whole = request.prompt_tokens // TRACE_BLOCK
    for hash_id in request.hash_ids[:whole]:
        made += random.Random(hash_id).choices(range(vocabulary), k=TRACE_BLOCK)
    rest = request.prompt_tokens - len(made)
    made += random.Random(f"own {number}").choices(range(vocabulary), k=rest)
    return made


def conversations(
    *, sessions: int, turns: int, rate: float, seed: int = 0, system_blocks: int = 1
) -> list[TraceRequest]:
    """A made-up trace of growing conversations that share a system prompt, for tests and first looks.

    ``rate``: requests per second; each turn repeats the last one's prompt and adds one to three blocks.
    """
    chance = random.Random(seed)
    fresh = iter(range(system_blocks, 10**9))
    history: list[list[int]] = [list(range(system_blocks)) for _ in range(sessions)]
    made, now = [], 0.0
    order = [session for session in range(sessions) for _ in range(turns)]
    chance.shuffle(order)
    for session in order:
        now += chance.expovariate(rate)
        ids = history[session]
        ids += [next(fresh) for _ in range(chance.randint(1, 3))]
        made.append(
            TraceRequest(
                at=now,
                prompt_tokens=len(ids) * TRACE_BLOCK + chance.randint(1, TRACE_BLOCK - 1),
                output_tokens=chance.randint(5, 60),
                hash_ids=(*ids, next(fresh)),
            )
        )
    return made


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write ``requests`` in the Mooncake format."""
    with path.open("w") as out:
        for request in requests:
            row = {
                "timestamp": round(request.at * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.hash_ids),
            }
            out.write(json.dumps(row) + "\n")


def reuse(requests: Sequence[TraceRequest]) -> float:
    """Share of prompt blocks that an infinite cache would have, in the order of arrival."""
    seen: set[int] = set()
    blocks = hits = 0
    for request in requests:
        blocks += len(request.hash_ids)
        hits += next((i for i, one in enumerate(request.hash_ids) if one not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    return hits / blocks if blocks else 0.0
