"""The published routing formulas, re-implemented over the same knowledge that our policies get.

Each is written from its description (documentation, paper or source), with its published constants, and is
given the better knowledge where it offers a choice: exact blocks from KV events instead of guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, PrefixView, RequestInfo
from npufleet.cluster.router.policies.chance import mix

BLOCK = 512


class SglCacheAware(Policy):
    """sglang-router and smg ``cache_aware``: the longest match where the loads are balanced, else the shortest
    queue (absolute threshold 64, relative 1.5, match threshold 0.3; docs of sgl-router 0.3.2, smg 1.13).
    """

    name = "sgl-cache-aware"
    prefix = PrefixView.APPROXIMATE

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The engines with the longest match, unless loads are out of balance or nothing matches enough."""
        loads = [engine.in_flight for engine in engines]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return engines
        best = max(engine.cached_tokens for engine in engines)
        if best <= 0.3 * request.prompt_tokens:
            return engines
        return [engine for engine in engines if engine.cached_tokens == best]

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Requests in flight."""
        return engine.in_flight


class LlmD(Policy):
    """llm-d's scorers: prefix 3, queue 2, KV cache 2 (default profile of its inference scheduler)."""

    name = "llm-d-3/2/2"
    prefix = PrefixView.PRECISE

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """All; remembers the span of queues, which the queue scorer needs."""
        waiting = [engine.report.waiting if engine.report else 0 for engine in engines]
        self._low, self._high = min(waiting), max(waiting)
        return engines

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """The negative weighted sum."""
        waiting = engine.report.waiting if engine.report else 0
        span = self._high - self._low
        queue = (self._high - waiting) / span if span else 1.0
        free = 1.0 - (engine.report.kv_usage if engine.report else 0.0)
        return -(3 * engine.cached_tokens / max(1, request.prompt_tokens) + 2 * queue + 2 * free)

    def choose(self, engines: Sequence[EngineLoad], scores: Sequence[float], ticket: int) -> int:
        """The best; ties at random (max-score picker)."""
        best = [i for i, score in enumerate(scores) if score == min(scores)]
        return best[mix(ticket) % len(best)]


class Dynamo(Policy):
    """Dynamo's KV router: prompt blocks still to be computed, waiting ones included, plus blocks in use."""

    name = "dynamo-cost"
    prefix = PrefixView.PRECISE
    kv_blocks = 1500  # of one engine

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """``prefill_load_scale * adjusted prefill + decode`` in blocks, scale 1, temperature 0."""
        prefill = (engine.waiting_tokens() + request.prompt_tokens - engine.cached_tokens) / BLOCK
        used = engine.report.kv_usage * self.kv_blocks if engine.report else 0.0
        return prefill + used + request.prompt_tokens / BLOCK


class RayPrefix(Policy):
    """Ray Serve's PrefixCacheAffinityRouter: replicas with the best match if it is above 0.1, else those with the
    smallest tree; the shortest queue among them (Ray 2.60: no imbalance threshold by default).
    """

    name = "ray-prefix"
    prefix = PrefixView.APPROXIMATE

    def __init__(self) -> None:
        self._tree: Counter[str] = Counter()

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The matched replicas, or the ones with the smallest tree."""
        best = max(engine.cached_tokens for engine in engines)
        if best >= 0.1 * request.prompt_tokens and best:
            return [engine for engine in engines if engine.cached_tokens == best]
        least = min(self._tree[engine.engine_id] for engine in engines)
        return [engine for engine in engines if self._tree[engine.engine_id] == least]

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Requests in flight."""
        return engine.in_flight

    def choose(self, engines: Sequence[EngineLoad], scores: Sequence[float], ticket: int) -> int:
        """The shortest queue; what it has to learn of the prompt goes into its tree."""
        at = super().choose(engines, scores, ticket)
        self._tree[engines[at].engine_id] += 1
        return at


FORMULAS: tuple[type[Policy], ...] = (SglCacheAware, LlmD, Dynamo, RayPrefix)
