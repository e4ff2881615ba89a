"""The precise index: which prefix blocks each engine's cache holds, from the engines' own KV events.

Engines name blocks by hashes of their own. A stored block comes with its tokens, so the index computes its
own key for it (``prompt.py``) below its parent's and remembers which engine hash means which key; a removal
names the engine hash alone. An engine may hold several copies of one block and removes them one at a time.

Events arrive late: after the step that stored the blocks, and later by the way here. Meanwhile a request
that was just sent counts as if its blocks were there, from the pick on (an engine takes requests in order,
so a sibling that follows finds them) until ``linger`` seconds after its first output.

A pick costs one dictionary look-up and one AND of integers per block, whatever the number of engines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from npufleet.cluster.router.prefix.base import PrefixSource, Slots, Some
from npufleet.cluster.router.prefix.layer import Layer
from npufleet.cluster.router.prefix.prompt import Key, Prompt

BlockHash = int
_Place = tuple[Key, int]  # a block and the bit of an engine


@dataclass(eq=False, slots=True)
class _Engine:
    """What one engine said."""

    bit: int
    keys: dict[tuple[int, BlockHash], Key] = field(default_factory=dict)  # by group and engine hash
    copies: dict[tuple[int, BlockHash], int] = field(default_factory=dict)  # beyond the first
    sizes: dict[int, int] = field(default_factory=dict)  # tokens per block, by group


@dataclass(eq=False, slots=True)
class _Expectation:
    """Blocks of one request that its engine will hold."""

    bit: int
    keys: Sequence[Key]
    open: bool = True
    lingers: bool = False


class PrefixIndex(PrefixSource):
    """Blocks by engine, exact up to the lag of events.

    Bounds: ``max_blocks`` distinct blocks, the least recently used go first; ``max_engine_blocks`` per
    engine, which no honest engine reaches; ``max_expected`` blocks of requests under way.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 4_000_000,
        max_engine_blocks: int = 1_000_000,
        max_expected: int = 1_000_000,
        linger: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_blocks = max_blocks
        self._max_engine_blocks = max_engine_blocks
        self._max_expected = max_expected
        self._linger = linger
        self._clock = clock
        self._slots = Slots()
        self._engines: dict[str, _Engine] = {}
        self._layers: dict[tuple[int, int], Layer] = {}  # by KV-cache group and block size
        self._expected: dict[Key, int] = {}  # masks of what the next two count, by block and engine
        self._coming: dict[_Place, int] = {}  # requests that have not started
        self._bridged: dict[_Place, int] = {}  # those that have, until an event tells of the block
        self._open: dict[int, set[_Expectation]] = {}  # by bit
        self._lingering: deque[tuple[float, _Expectation]] = deque()
        self.orphans = 0  # blocks that could not be placed: their parent is not known

    @property
    def blocks(self) -> int:
        """Distinct blocks known now, of all groups."""
        return sum(len(layer) for layer in self._layers.values())

    @property
    def expected(self) -> int:
        """Distinct blocks of requests under way."""
        return len(self._expected)

    def engine_blocks(self, engine_id: str) -> int:
        """Blocks that the engine says it holds, of all groups."""
        engine = self._engines.get(engine_id)
        return len(engine.keys) if engine else 0

    def parent_key(self, engine_id: str, group: int, parent: BlockHash) -> Key | None:
        """The key of the engine's block ``parent``, None where it is not known."""
        engine = self._engines.get(engine_id)
        return engine.keys.get((group, parent)) if engine else None

    def stored(
        self,
        engine_id: str,
        blocks: Iterable[tuple[BlockHash, Key]],
        *,
        block_size: int,
        group: int = 0,
        window: int = 0,
        copies: bool = True,
    ) -> None:
        """The engine stored ``blocks`` of ``block_size`` tokens in KV-cache group ``group``.

        ``copies``: a block that it holds already is one more copy. vLLM also reports blocks that it reuses,
        which are not; those reports always begin at a prompt's first block (no parent).
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = _Engine(self._slots.bit(engine_id))
        layer = self._layers.get((group, block_size))
        if layer is None:
            layer = Layer(block_size=block_size, window=window, limit=self._max_blocks)
            self._layers[group, block_size] = layer
        if engine.sizes.setdefault(group, block_size) != block_size:
            self.cleared(engine_id)  # the same id with other blocks is another engine
            engine.sizes = {group: block_size}
        layer.users |= engine.bit
        for block_hash, key in blocks:
            name = (group, block_hash)
            self._told((key, engine.bit))
            if name in engine.keys:
                if copies:
                    engine.copies[name] = engine.copies.get(name, 0) + 1
                continue
            if len(engine.keys) >= self._max_engine_blocks:
                self._forget(engine, next(iter(engine.keys)))
            engine.keys[name] = key
            layer.add(key, engine.bit)

    def removed(self, engine_id: str, hashes: Iterable[BlockHash], *, group: int = 0) -> None:
        """The engine gave up one copy of each block in ``hashes``."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        for block_hash in hashes:
            name = (group, block_hash)
            copies = engine.copies.get(name, 0)
            if copies > 1:
                engine.copies[name] = copies - 1
            elif copies:
                del engine.copies[name]
            elif name in engine.keys:
                self._forget(engine, name)

    def cleared(self, engine_id: str) -> None:
        """The engine's cache is empty."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            for name in list(engine.keys):
                self._forget(engine, name)
            engine.copies.clear()

    def drop(self, engine_id: str) -> None:
        """The engine is gone: nothing of it remains, not even what was expected."""
        self.cleared(engine_id)
        engine = self._engines.pop(engine_id, None)
        bit = engine.bit if engine else self._slots.bit(engine_id)
        for ticket in list(self._open.pop(bit, ())):
            self._close(ticket)
        for layer in self._layers.values():
            layer.users &= ~bit
        self._slots.release(engine_id)

    def match(self, prompt: Prompt, some: Some | None = None) -> Mapping[str, int]:
        """Engine id -> leading tokens of ``prompt`` that it need not compute.

        The last token is always computed, so a prompt that is cached as a whole counts one block less.
        """
        self._expire()
        found: dict[str, int] = {}
        full = [layer for layer in self._layers.values() if not layer.window]
        for layer in full:
            size = layer.block_size
            depths = layer.depths(_usable(prompt, size), self._expected)
            few = self._slots.depths(depths, some if len(full) == 1 else None)
            tokens = {name: depth * size for name, depth in few.items()}
            if len(full) > 1:  # an engine needs the prefix in each of its groups
                for name in self._slots.names(layer.users):
                    found[name] = min(found.get(name, prompt.length), tokens.get(name, 0))
            else:
                found = tokens
        for layer in self._layers.values():
            if layer.window:
                keys = _usable(prompt, layer.block_size)
                for name in found.keys() & set(self._slots.names(layer.users)):
                    found[name] = layer.reach(keys, found[name], self._slots.bit(name))
        return {name: tokens for name, tokens in found.items() if tokens}

    def expect(self, engine_id: str, prompt: Prompt) -> _Expectation:
        """Count the blocks of ``prompt`` as held by the engine until :meth:`started` or :meth:`ended`."""
        bit = self._slots.bit(engine_id)
        full = [layer for layer in self._layers.values() if not layer.window]
        sizes = {layer.block_size for layer in full if layer.users & bit} or {
            layer.block_size for layer in full
        }
        keys: list[Key] = [key for size in sizes for key in prompt.keys(size)]
        if len(self._coming) + len(self._bridged) + len(keys) > self._max_expected:
            keys = []
        for key in keys:
            self._expected[key] = self._expected.get(key, 0) | bit
            self._coming[key, bit] = self._coming.get((key, bit), 0) + 1
        ticket = _Expectation(bit, keys)
        self._open.setdefault(bit, set()).add(ticket)
        return ticket

    def started(self, ticket: object) -> None:
        """The blocks are there; the expectation bridges the way of an event only, and ends with any of that block."""
        assert isinstance(ticket, _Expectation)
        if ticket.open and not ticket.lingers:
            ticket.lingers = True
            for key in ticket.keys:
                place = key, ticket.bit
                if left := self._coming.pop(place) - 1:
                    self._coming[place] = left
                self._bridged[place] = self._bridged.get(place, 0) + 1
            self._lingering.append((self._clock() + self._linger, ticket))
        self._expire()

    def ended(self, ticket: object) -> None:
        """A request that never started leaves no blocks; one that did is left to its event."""
        assert isinstance(ticket, _Expectation)
        if not ticket.lingers:
            self._close(ticket)

    def _expire(self) -> None:
        now = self._clock()
        while self._lingering and self._lingering[0][0] <= now:
            self._close(self._lingering.popleft()[1])

    def _close(self, ticket: _Expectation) -> None:
        if ticket.open:
            ticket.open = False
            self._open.get(ticket.bit, set()).discard(ticket)
            counts = self._bridged if ticket.lingers else self._coming
            for key in ticket.keys:
                place = key, ticket.bit
                left = counts.pop(place, 0) - 1  # below 0: an event has told of it
                if left > 0:
                    counts[place] = left
                elif left == 0:
                    self._unmark(place)

    def _told(self, place: _Place) -> None:
        """An event told of a block, so no request that has started stands for it any more."""
        if self._bridged.pop(place, 0):
            self._unmark(place)

    def _unmark(self, place: _Place) -> None:
        if place in self._coming or place in self._bridged:
            return
        key, bit = place
        mask = self._expected[key] & ~bit
        if mask:
            self._expected[key] = mask
        else:
            del self._expected[key]

    def _forget(self, engine: _Engine, name: tuple[int, BlockHash]) -> None:
        key = engine.keys.pop(name)
        engine.copies.pop(name, None)
        self._told((key, engine.bit))
        layer = self._layers.get((name[0], engine.sizes[name[0]]))
        if layer is not None:
            layer.remove(key, engine.bit)


def _usable(prompt: Prompt, size: int) -> Sequence[Key]:
    """Keys of the blocks that a cache can spare the engine: all but the one with the last token."""
    return prompt.keys(size)[: max(0, prompt.length - 1) // size]
