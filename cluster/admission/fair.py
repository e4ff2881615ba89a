"""A queue whose tenants share the way out by their weights.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): each entry gets a start tag, the later of the queue's
virtual time and the tenant's last finish tag; the lowest start goes first, and the finish tag grows with the entry's
cost over the tenant's weight. A more urgent priority goes before all others.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Entries wait here; none of them twice."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, T]] = []
        self._live: set[int] = set()
        self._number: dict[int, int] = {}  # id of an entry -> its number
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def push(self, entry: T, *, tenant: str, weight: float, priority: int, cost: float) -> None:
        """Append ``entry``; a lower ``priority`` is more urgent, ``cost`` and ``weight`` are above 0."""
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost / weight
        number = next(self._numbers)
        self._live.add(number)
        self._number[id(entry)] = number
        heapq.heappush(self._heap, (priority, start, number, entry))

    def pop(self) -> T | None:
        """Take the entry whose turn it is; None where nobody waits."""
        while self._heap:
            _, start, number, entry = heapq.heappop(self._heap)
            if number not in self._live:
                continue
            self._forget(number, entry)
            self._virtual = max(self._virtual, start)
            if not self._live:  # nobody is owed anything any more
                self._finish.clear()
                self._heap.clear()
                self._virtual = 0.0
            return entry
        return None

    def remove(self, entry: T) -> bool:
        """Take ``entry`` out; False where it does not wait."""
        number = self._number.get(id(entry))
        if number is None:
            return False
        self._forget(number, entry)
        return True

    def _forget(self, number: int, entry: T) -> None:
        self._live.discard(number)
        del self._number[id(entry)]
