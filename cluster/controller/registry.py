"""The endpoint registry: which engines there are, as a versioned snapshot.

Nothing is written to disk. Engines repeat their endpoint with every heartbeat, so a restarted controller
knows all of them after one heartbeat interval; it has a new epoch, and watchers start over.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace

from ..endpoints import EngineEndpoint, EngineState, Snapshot

HEARTBEAT_S = 2.0
"""How often an engine repeats its endpoint."""

EXPIRY_S = 20.0
"""An engine that was silent this long is no longer published. Routers watch the engines themselves and stop
using a dead one much earlier; this only clears what nobody took back."""

SILENT_S = 3.0
"""An engine that missed its heartbeat this long is looked at: one that was killed need not wait for its expiry."""


@dataclass(kw_only=True)
class Registry:
    """Engines by id, with the version that grows with each change that a watcher can see."""

    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    version: int = 0
    _engines: dict[str, EngineEndpoint] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def snapshot(self) -> Snapshot:
        """Return all engines at the present version, in the order in which they registered."""
        return Snapshot(epoch=self.epoch, version=self.version, endpoints=tuple(self._engines.values()))

    def heartbeat(self, endpoint: EngineEndpoint, now: float) -> None:
        """Register ``endpoint``, or keep it alive; ``now`` is seconds on a monotonic clock."""
        self._seen[endpoint.engine_id] = now
        if self._engines.get(endpoint.engine_id) != endpoint:
            self._engines[endpoint.engine_id] = endpoint
            self._bump()

    def remove(self, engine_id: str) -> None:
        """Forget an engine; unknown ones are ignored, so that saying goodbye twice is harmless."""
        self._seen.pop(engine_id, None)
        if self._engines.pop(engine_id, None) is not None:
            self._bump()

    def set_state(self, engine_id: str, state: EngineState) -> None:
        """Change the state of a known engine, for example to DRAINING.

        Raises:
            ValueError: if the engine is not known.
        """
        if engine_id not in self._engines:
            known = ", ".join(self._engines) or "none"
            raise ValueError(f"engine {engine_id!r} is not registered; registered are {known}")
        if self._engines[engine_id].state is not state:
            self._engines[engine_id] = replace(self._engines[engine_id], state=state)
            self._bump()

    def silent(self, now: float) -> tuple[EngineEndpoint, ...]:
        """Return the engines that were silent for ``SILENT_S``."""
        return tuple(self._engines[engine] for engine, seen in self._seen.items() if now - seen > SILENT_S)

    def expire(self, now: float) -> tuple[EngineEndpoint, ...]:
        """Forget engines that were silent for ``EXPIRY_S`` and return them."""
        silent = tuple(self._engines[engine] for engine, seen in self._seen.items() if now - seen > EXPIRY_S)
        for endpoint in silent:
            self.remove(endpoint.engine_id)
        return silent

    async def newer(self, epoch: str, version: int, seconds: float) -> Snapshot:
        """Return the present snapshot if the caller has not seen it, else wait for the next change.

        After ``seconds`` seconds the unchanged snapshot is returned, so that a watcher knows the registry
        lives.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while (epoch, version) == (self.epoch, self.version):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return self.snapshot()

    def _bump(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
