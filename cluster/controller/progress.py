"""How far each engine has come with its start: the phases that `npufleet serve` and `status` show."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """What an engine is busy with; the order is the order of a start."""

    PLACING = "placing"  # waiting for NPUs
    LOADING = "loading"  # worker processes start, weights load, the cache is laid out
    READY = "ready"
    FAILED = "failed"  # the next try may succeed
    REFUSED = "refused"  # failed, and every other try would fail the same way


STARTING = (Phase.PLACING, Phase.LOADING)
ENDED = (Phase.FAILED, Phase.REFUSED)

REPEAT_S = 5.0
"""How often an engine that starts repeats how far it is."""

SILENT_S = 30.0
"""A start that was not heard of for so long was stopped."""

FAILED_S = 600.0
"""How long a failed start is shown."""


@dataclass(kw_only=True)
class EngineProgress:
    """One engine's start."""

    engine_id: str
    model: str
    phase: Phase
    detail: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # by finished phase
    generation: str = ""
    heard: float = 0.0  # of the last report, seconds on a monotonic clock

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for status answers."""
        return {
            "engine_id": self.engine_id,
            "model": self.model,
            "phase": str(self.phase),
            "detail": self.detail,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "generation": self.generation,
        }


@dataclass(kw_only=True)
class ProgressBoard:
    """The newest progress of every engine, the last ``keep`` of them."""

    keep: int = 256
    _engines: dict[str, EngineProgress] = field(default_factory=dict)

    def report(self, entry: EngineProgress) -> None:
        """Take over what an engine says about its start."""
        self._engines.pop(entry.engine_id, None)
        self._engines[entry.engine_id] = entry
        while len(self._engines) > self.keep:
            self._engines.pop(next(iter(self._engines)))

    def expire(self, now: float) -> None:
        """Forget starts that say nothing any more: those that were stopped, and failures that are long over."""
        for entry in self.all():
            if (
                now - entry.heard > (FAILED_S if entry.phase in ENDED else SILENT_S)
                and entry.phase is not Phase.READY
            ):
                del self._engines[entry.engine_id]

    def remove(self, engine_id: str) -> None:
        """Forget an engine that is gone."""
        self._engines.pop(engine_id, None)

    def all(self) -> tuple[EngineProgress, ...]:
        """Return the progress of all engines, the one heard of last at the end."""
        return tuple(self._engines.values())
