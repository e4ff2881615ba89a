"""Applies the scaling policy: gathers each model's load, decides, and changes the number of engines."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..endpoints import EngineState
from ..scaling.policy import Load, Memory, decide
from .changes import Changes
from .progress import ENDED, Phase, ProgressBoard
from .registry import Registry

logger = logging.getLogger(__name__)

LOOK_S = 5.0
START_S = 60.0  # assumed until an engine has started


@dataclass(kw_only=True)
class Autoscaler:
    """Decides for all models whose number of engines follows the load."""

    changes: Changes
    registry: Registry
    progress: ProgressBoard
    clock: Callable[[], float] = time.monotonic
    why: dict[str, str] = field(default_factory=dict)  # model -> of the last change
    _loads: dict[str, Mapping[str, float]] = field(default_factory=dict)  # by engine
    _refused: Counter[str] = field(default_factory=Counter)  # by model, since the last look
    _refused_before: dict[tuple[str, str], int] = field(default_factory=dict)  # by front end and model
    _memories: dict[str, Memory] = field(default_factory=dict)
    _start_s: dict[str, float] = field(default_factory=dict)
    _looked: float = 0.0

    def heard(self, engine_id: str, load: Mapping[str, float]) -> None:
        """Take over what an engine says about its load."""
        self._loads[engine_id] = load

    def refused(self, front: str, counts: Mapping[str, int]) -> None:
        """Take over how many requests a front end has turned away so far, by model, for want of an engine."""
        for model, count in counts.items():
            before = self._refused_before.get((front, model), 0)
            self._refused[model] += max(0, count - before)
            self._refused_before[front, model] = count

    async def look(self, scale: Callable[[str, int], Awaitable[None]]) -> None:
        """Decide, every ``LOOK_S`` seconds at most; ``scale(model, engines)`` makes a decision true.

        While a change by hand is under way nothing is decided: its engines come and go, and so does the load.
        """
        now = self.clock()
        if now - self._looked < LOOK_S or self.changes.busy:
            return
        self._looked = now
        known = {endpoint.engine_id for endpoint in self.registry.snapshot().endpoints}
        self._loads = {engine: load for engine, load in self._loads.items() if engine in known}
        wish = self.changes.wish
        for model in wish.config.models:
            if model.scaling is None:
                continue
            wanted = wish.engines[model.name]
            memory = self._memories.get(model.name, Memory())
            made = decide(model.scaling, wanted, self.load(model.name), memory, now)
            self._memories[model.name] = made.memory
            self._refused.pop(model.name, None)
            if made.engines != wanted:
                self.why[model.name] = f"{wanted} -> {made.engines}: {made.why}"
                logger.info("model %s: %s", model.name, self.why[model.name])
                await scale(model.name, made.engines)

    def load(self, model: str) -> Load:
        """Return the load of one model deployment."""
        endpoints = [e for e in self.registry.snapshot().endpoints if e.model == model]
        ready = [e for e in endpoints if e.state is EngineState.READY]
        told = [self._loads.get(endpoint.engine_id, {}) for endpoint in ready]
        starts = [entry for entry in self.progress.all() if entry.model == model]
        ended = [sum(entry.seconds.values()) for entry in starts if entry.phase is Phase.READY]
        if ended:
            self._start_s[model] = median(ended)
        return Load(
            ready=len(ready),
            starting=sum(entry.phase is not Phase.READY and entry.phase not in ENDED for entry in starts),
            running=round(sum(load.get("running", 0) for load in told)),
            waiting=round(sum(load.get("waiting", 0) for load in told)),
            refused=self._refused[model],
            kv_usage=sum(load.get("kv_usage", 0.0) for load in told) / max(1, len(told)),
            ttft_p90=max((load["ttft_p90"] for load in told if "ttft_p90" in load), default=None),
            tpot_p90=max((load["tpot_p90"] for load in told if "tpot_p90" in load), default=None),
            start_s=self._start_s.get(model, START_S),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for status answers: why the number of engines changed last, by model."""
        return dict(self.why)
