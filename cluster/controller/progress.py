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


@dataclass(kw_only=True)
class EngineProgress:
    """One engine's start."""

    engine_id: str
    model: str
    phase: Phase
    detail: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # by finished phase

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for status answers."""
        return {
            "engine_id": self.engine_id,
            "model": self.model,
            "phase": str(self.phase),
            "detail": self.detail,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
        }


@dataclass(kw_only=True)
class ProgressBoard:
    """The newest progress of every engine, the last ``keep`` of them."""

    keep: int = 256
    _engines: dict[str, EngineProgress] = field(default_factory=dict)

    def report(
        self, engine_id: str, model: str, phase: Phase, detail: str, seconds: dict[str, float]
    ) -> None:
        """Take over what an engine says about its start; ``seconds`` are those of its finished phases."""
        entry = EngineProgress(
            engine_id=engine_id, model=model, phase=phase, detail=detail, seconds=dict(seconds)
        )
        self._engines.pop(engine_id, None)
        self._engines[engine_id] = entry
        while len(self._engines) > self.keep:
            self._engines.pop(next(iter(self._engines)))

    def remove(self, engine_id: str) -> None:
        """Forget an engine that is gone."""
        self._engines.pop(engine_id, None)

    def all(self) -> tuple[EngineProgress, ...]:
        """Return the progress of all engines, the one heard of last at the end."""
        return tuple(self._engines.values())
