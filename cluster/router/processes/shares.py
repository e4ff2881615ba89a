"""What each of several router processes has on each engine, in memory that they share.

A router alone knows what it sent; an engine's report is as old as its last step. Were that all, several routers would
send to the engine that looked idle to each of them (measured in docs/benchmarks.md). So each writes its own numbers
where the others read them: a file of doubles, mapped by all, of which each process writes only its own column. A
number that is read while it is written is at most one request off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from npufleet.cluster.router.ledger import NOTHING, Share

SLOTS = 4096  # engines that can be told of at once
_FIELDS = len(NOTHING)
_FRESH = 0.0005  # seconds for which sums are used again


class ShareTable:
    """One process's view. ``row`` is its own number."""

    def __init__(self, file: Path, rows: int, row: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``file`` is one that :func:`create` made for ``rows`` processes."""
        self._cells = np.memmap(file, dtype=np.float64, mode="r+", shape=(SLOTS, rows, _FIELDS))
        self._row = row
        self._clock = clock
        self._slots: dict[str, int] = {}
        self._used = 0
        self._sums: list[list[float]] = []
        self._summed_at = float("-inf")

    def assign(self, slots: Mapping[str, int]) -> None:
        """The parent's word on which engine has which place."""
        for engine_id in (
            self._slots.keys() - slots.keys()
        ):  # nothing of it may be left for the next one there
            self._cells[self._slots[engine_id], self._row] = 0.0
        self._slots = dict(slots)
        self._used = max(slots.values(), default=-1) + 1
        self._summed_at = float("-inf")

    def tell(self, engine_id: str, share: Share) -> None:
        """What this process has on the engine now."""
        slot = self._slots.get(engine_id)
        if slot is not None:
            self._cells[slot, self._row] = share

    def others(self, engine_id: str) -> Share:
        """What all others have on it."""
        slot = self._slots.get(engine_id)
        if slot is None:
            return NOTHING
        now = self._clock()
        if now - self._summed_at > _FRESH:
            cells = self._cells[: self._used]
            self._sums = (cells.sum(axis=1) - cells[:, self._row]).tolist()
            self._summed_at = now
        in_flight, queued, tokens, pairs = self._sums[slot]
        return Share(int(in_flight), int(queued), int(tokens), pairs)

    def clear(self, row: int) -> None:
        """The process of ``row`` is gone, and its requests with it."""
        self._cells[:, row] = 0.0


class Slots:
    """The parent's book of places: a new engine gets the one that was unused for the longest time."""

    def __init__(self, most: int = SLOTS) -> None:
        self._of: dict[str, int] = {}
        self._free = list(range(most))

    def update(self, engines: set[str]) -> dict[str, int]:
        """The places of ``engines``; those that are gone give theirs back. Beyond the last place there is none."""
        for gone in [engine for engine in self._of if engine not in engines]:
            self._free.append(self._of.pop(gone))
        for engine in sorted(engines - self._of.keys()):
            if self._free:
                self._of[engine] = self._free.pop(0)
        return dict(self._of)


def create(file: Path, rows: int) -> None:
    """Make the file for ``rows`` processes, all of it zero."""
    with open(file, "wb") as made:
        made.truncate(SLOTS * rows * _FIELDS * np.dtype(np.float64).itemsize)
