"""What the router asks of any knowledge of prefix caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from npufleet.cluster.router.prefix.prompt import Prompt


class Some(NamedTuple):
    """A few engines of many."""

    most: int  # those that hold the most of a prompt, so many
    also: Collection[str]  # and these


class PrefixSource(ABC):
    """Knows, rightly or by a guess, which engine's cache holds how much of a prompt.

    Belongs to one event loop; every method returns at once.
    """

    @abstractmethod
    def match(self, prompt: Prompt, some: Some | None = None) -> Mapping[str, int]:
        """Engine id -> leading tokens of ``prompt`` that its cache holds; engines with none are left out.

        ``some`` limits the engines asked about.
        """

    @abstractmethod
    def expect(self, engine_id: str, prompt: Prompt) -> object:
        """``prompt`` goes to the engine now, so its blocks will be there; the ticket of that expectation."""

    @abstractmethod
    def started(self, ticket: object) -> None:
        """The engine answered: the blocks of that expectation are in its cache."""

    @abstractmethod
    def ended(self, ticket: object) -> None:
        """The request ended, started or not."""

    @abstractmethod
    def drop(self, engine_id: str) -> None:
        """The engine is gone, or what is known of it is no longer trusted."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Distinct blocks known now."""


class Slots:
    """Gives each engine a bit, so that the engines which hold a block fit in one integer."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}
        self._name: list[str] = []
        self._free: list[int] = []

    def bit(self, engine_id: str) -> int:
        """The engine's bit as a mask; a new engine gets a free one."""
        bit = self._bit.get(engine_id)
        if bit is None:
            if self._free:
                place = self._free.pop()
                self._name[place] = engine_id
            else:
                place = len(self._name)
                self._name.append(engine_id)
            bit = self._bit[engine_id] = 1 << place
        return bit

    def release(self, engine_id: str) -> None:
        """The bit is free for another engine; no mask may hold it any more."""
        bit = self._bit.pop(engine_id, 0)
        if bit:
            self._free.append(bit.bit_length() - 1)

    def depths(self, pairs: Iterable[tuple[int, int]], some: Some | None) -> dict[str, int]:
        """Depth by engine for ``(engines, depth)`` pairs in rising order."""
        if some is None:
            return {name: depth for mask, depth in pairs for name in self.names(mask)}
        deepest = list(pairs)[::-1]
        found = dict(
            islice(((name, depth) for mask, depth in deepest for name in self.names(mask)), some.most)
        )
        for name in some.also:
            bit = self._bit.get(name, 0)
            depth = next((depth for mask, depth in deepest if mask & bit), 0) if bit else 0
            if depth:
                found[name] = depth
        return found

    def names(self, mask: int) -> Iterator[str]:
        """The engines in ``mask``."""
        while mask:
            low = mask & -mask
            yield self._name[low.bit_length() - 1]
            mask ^= low
