"""The better of two engines drawn at random (Mitzenmacher, "The Power of Two Choices", 2001).

Needs little knowledge and never sends a burst to one engine, even where what is known of the loads is old.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.policies.chance import mix
from npufleet.cluster.router.policies.least_load import waiting_work


class PowerOfTwo(Policy):
    """Two different engines by chance, then the one with less work waiting."""

    name = "power-of-two"

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Work before a new request, in prompt tokens."""
        return waiting_work(engine)

    def choose(self, engines: Sequence[EngineLoad], scores: Sequence[float], ticket: int) -> int:
        """The cheaper of two."""
        if len(engines) == 1:
            return 0
        drawn = mix(self._seed ^ mix(ticket))
        first = drawn % len(engines)
        second = (first + 1 + (drawn >> 32) % (len(engines) - 1)) % len(engines)
        return first if scores[first] <= scores[second] else second
