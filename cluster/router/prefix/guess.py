"""The approximate index: what an engine's cache probably holds, from where this router sent what.

For engines without KV events. Each engine is given as many blocks as its cache about has; the least recently
sent go first, and what was not sent again for ``ttl`` seconds is not believed. Blocks of answers and of other
routers' requests are unknown to it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from npufleet.cluster.router.prefix.base import PrefixSource, Slots, Some
from npufleet.cluster.router.prefix.layer import Layer
from npufleet.cluster.router.prefix.prompt import Key, Prompt


@dataclass(eq=False, slots=True)
class _Engine:
    bit: int
    sent: OrderedDict[Key, float] = field(default_factory=OrderedDict)  # when, oldest first


class PrefixGuess(PrefixSource):
    """A bounded tree of past prompts; a block is found only below its parent, because its key is chained."""

    def __init__(
        self,
        *,
        block_size: int = 128,
        engine_blocks: int = 8192,
        max_blocks: int = 2_000_000,
        ttl: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_size`` in tokens; ``engine_blocks`` and ``max_blocks`` bound one engine and all."""
        self._layer = Layer(block_size=block_size, window=0, limit=max_blocks)
        self._engine_blocks = engine_blocks
        self._ttl = ttl
        self._clock = clock
        self._slots = Slots()
        self._engines: dict[str, _Engine] = {}

    @property
    def blocks(self) -> int:
        """Distinct blocks remembered now."""
        return len(self._layer)

    def match(self, prompt: Prompt, some: Some | None = None) -> Mapping[str, int]:
        """Engine id -> leading tokens of ``prompt`` that were sent there before."""
        size = self._layer.block_size
        keys = prompt.keys(size)[: max(0, prompt.length - 1) // size]
        found = self._slots.depths(self._layer.depths(keys, {}), some)
        return {name: depth * size for name, depth in found.items()}

    def expect(self, engine_id: str, prompt: Prompt) -> object:
        """Remember the prompt."""
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = _Engine(self._slots.bit(engine_id))
        now = self._clock()
        for key in reversed(prompt.keys(self._layer.block_size)):  # the first block is the last to go
            engine.sent[key] = now
            engine.sent.move_to_end(key)
            self._layer.add(key, engine.bit)
        while engine.sent and (
            len(engine.sent) > self._engine_blocks or next(iter(engine.sent.values())) < now - self._ttl
        ):
            key, _ = engine.sent.popitem(last=False)
            self._layer.remove(key, engine.bit)
        return engine_id

    def started(self, ticket: object) -> None:
        """Nothing changes: the prompt is remembered already."""

    def ended(self, ticket: object) -> None:
        """Nothing changes: what was computed stays in the cache."""

    def drop(self, engine_id: str) -> None:
        """Forget the engine."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            for key in engine.sent:
                self._layer.remove(key, engine.bit)
            self._slots.release(engine_id)
