"""Each engine in turn, whatever it is doing."""

from __future__ import annotations

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo


class RoundRobin(Policy):
    """All engines cost the same, so the ticket alone decides."""

    name = "round-robin"

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Always 0."""
        return 0.0
