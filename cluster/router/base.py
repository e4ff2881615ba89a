"""What a routing policy sees and decides.

A policy is three pure functions over immutable values: ``filter`` narrows the candidates, ``score`` gives
each a cost (lower is better), ``choose`` takes one. It never sees a channel and never counts anything itself,
so each decision can be replayed from its inputs. Whether an engine may be picked at all (ready, right model,
not excluded by a retry) is settled before a policy is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInfo:
    """One request as the router sees it before an engine is chosen."""

    model: str  # name of the model deployment; "" = the only one there is
    prompt_tokens: int = 0  # 0 = not known (for example a text prompt)
    request_id: str = ""
    cache_salt: str = ""  # requests with different salts never share prefix blocks
    priority: int = 0  # lower is more urgent, as in vLLM
    excluded: frozenset[str] = frozenset()  # engine ids that already failed this request


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What an engine said about itself (GetLoads, summed over its data-parallel ranks)."""

    running: int = 0  # requests in the running batch
    waiting: int = 0  # requests queued inside the engine
    waiting_tokens: int = 0  # prompt tokens of waiting requests that the prefix cache does not hold
    kv_usage: float = 0.0  # share of KV blocks in use, 0..1, mean over ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """One engine's load at one moment.

    ``report`` is None when the engine never answered GetLoads or its last answer is too old to be believed;
    the router's own counts are always true, for what this router sent.
    """

    engine_id: str
    in_flight: int = 0  # requests of this router that have not ended
    queued_tokens: int = 0  # their prompt tokens, as far as no output came back yet
    report: LoadReport | None = None
    requests_since: int = 0  # requests sent minus requests ended since the report was asked for
    tokens_since: int = 0  # prompt tokens sent minus prompt tokens started since then


class Policy(ABC):
    """Chooses one of several engines that could all take the request."""

    name: ClassVar[str]

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The engines worth scoring; an empty answer means that all of them are."""
        return engines

    @abstractmethod
    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """The cost of sending ``request`` to ``engine``: finite, lower is better."""

    def choose(self, engines: Sequence[EngineLoad], scores: Sequence[float], ticket: int) -> int:
        """The index of the engine to use: a cheapest one, and among equals the ``ticket``-th in turn.

        ``ticket`` grows by one with each decision for a model, so equals share the work evenly.
        """
        lowest = min(scores)
        best = [i for i, score in enumerate(scores) if score == lowest]
        return best[ticket % len(best)]


def decide(policy: Policy, request: RequestInfo, engines: Sequence[EngineLoad], ticket: int) -> EngineLoad:
    """Run filter, score and choose over ``engines`` (at least one, in a stable order)."""
    assert engines, "decide() needs a candidate; having none is the picker's error to report"
    kept = policy.filter(request, engines) or engines
    scores = [policy.score(request, engine) for engine in kept]
    return kept[policy.choose(kept, scores, ticket)]
