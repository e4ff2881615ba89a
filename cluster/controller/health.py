"""What the controller remembers of engines that died: waits before the next start, and fenced NPUs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..endpoints import EngineEndpoint
from . import deaths
from .deaths import Death

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Health:
    """The deaths in one fleet."""

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    deaths: Counter[str] = field(default_factory=Counter)  # all of them, by model
    _deaths: list[Death] = field(default_factory=list)
    _remembered: dict[str, float] = field(
        default_factory=dict
    )  # fenced before this controller's time: until when

    def died(self, endpoint: EngineEndpoint, why: str, ranks: tuple[int, ...] = ()) -> None:
        """Note that an engine ended without being asked to; ``ranks`` failed, all if nobody knows."""
        npus = (
            tuple(endpoint.places[rank] for rank in ranks if rank < len(endpoint.places)) or endpoint.places
        )
        lived = self.wall_clock() - endpoint.ready_at if endpoint.ready_at else 0.0
        death = Death(
            at=self.clock(), model=endpoint.model, engine_id=endpoint.engine_id, why=why,
            lived=max(0.0, lived), npus=npus,
        )  # fmt: skip
        logger.error("engine %s died: %s", endpoint.engine_id, why)
        self.deaths[endpoint.model] += 1
        self._deaths = [*deaths.recent(self._deaths, death.at), death]

    def wait(self, model: str) -> tuple[float, str]:
        """Return how many seconds the next engine of ``model`` has to wait, and why."""
        now = self.clock()
        seconds = deaths.wait_before_start(self._deaths, model, now)
        if not seconds:
            return 0.0, ""
        own = deaths.loop(self._deaths, model, now)
        return seconds, (
            f"{len(own)} engines of it died soon after their start within {deaths.WINDOW_S / 60:.0f} minutes, "
            f"the last one because {own[-1].why}; the next starts in {seconds:.0f} s"
        )

    def fenced(self) -> frozenset[str]:
        """Return the NPUs (NODE_ID:NUMBER) that no engine is to get now."""
        return frozenset(self.fences())

    def fences(self) -> dict[str, float]:
        """Return the NPUs that no engine is to get now, with the time until which, in seconds since the epoch."""
        now, wall = self.clock(), self.wall_clock()
        before = {npu: until for npu, until in self._remembered.items() if until > wall}
        own = deaths.fenced_until(self._deaths, now)
        return before | {npu: until - now + wall for npu, until in own.items()}

    def remember(self, fences: Mapping[str, float]) -> None:
        """Take over what a controller before this one has fenced; see :meth:`fences`."""
        self._remembered = dict(fences)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for status answers."""
        now = self.clock()
        return {
            "fenced": sorted(self.fenced()),
            "deaths": [
                {"model": d.model, "engine_id": d.engine_id, "why": d.why, "seconds_ago": round(now - d.at)}
                for d in deaths.recent(self._deaths, now)
            ],
        }
