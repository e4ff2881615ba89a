"""An engine at random, whatever it is doing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.policies.chance import mix


class RandomPick(Policy):
    """Each engine with the same probability. ``seed`` makes its choices follow from the tickets alone."""

    name = "random"

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Always 0."""
        return 0.0

    def choose(self, engines: Sequence[EngineLoad], scores: Sequence[float], ticket: int) -> int:
        """Any of them."""
        return mix(self._seed ^ mix(ticket)) % len(engines)
