"""What the two prefix policies share: most of the prompt cached, unless that engine is far busier.

    cost = tokens to compute + what waits before them, beyond the least that waits anywhere

An engine is left out while it has so much more waiting than the least busy one that computing the whole
prompt there would be sooner. That limit grows with the prompt, so affinity is not thrown away at the peak,
when it is worth most.
"""

from __future__ import annotations

from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.policies.least_load import waiting_work

SLACK_TOKENS = 8192  # more work than the least busy engine that is always borne for a hit


class PrefixAffinity(Policy):
    """The engine that has to compute least of the prompt; among equals the one with the least work."""

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """Engines whose cached part is worth the wait."""
        work = [waiting_work(engine) for engine in engines]
        limit = min(work) + SLACK_TOKENS
        return [e for e, waiting in zip(engines, work, strict=True) if waiting <= limit + e.cached_tokens]

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Tokens to compute; the work before them decides between equals."""
        work = waiting_work(engine)
        return request.prompt_tokens - engine.cached_tokens + work / (work + 1.0)
