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
from enum import StrEnum
from typing import ClassVar, NamedTuple

from npufleet.cluster.admission.tenants import ANYONE, Tenant
from npufleet.cluster.router.prefix.prompt import Prompt
from npufleet.cluster.router.split.base import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInfo:
    """One request as the router sees it before an engine is chosen."""

    model: str  # name of the model deployment; "" = the only one there is
    prompt_tokens: int = 0  # 0 = not known (for example a text prompt)
    request_id: str = ""
    session: str = ""  # requests of one conversation carry the same; "" = not known
    cache_salt: str = ""  # requests with different salts never share prefix blocks
    priority: int = 0  # lower is more urgent, as in vLLM
    excluded: frozenset[str] = frozenset()  # engine ids that already failed this request
    prompt: Prompt | None = None  # its prefix blocks, where the token ids are known
    tenant: Tenant = ANYONE  # who sent it
    stage: Stage = Stage.WHOLE  # what of it an engine is wanted for
    admitted: bool = False  # admission has let it in


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What an engine said about itself (GetLoads, summed over its data-parallel ranks)."""

    running: int = 0  # requests in the running batch
    waiting: int = 0  # requests queued inside the engine
    waiting_tokens: int = 0  # prompt tokens of waiting requests that the prefix cache does not hold
    kv_usage: float = 0.0  # share of KV blocks in use, 0..1, mean over ranks


class Pace(NamedTuple):
    """How fast an engine computes prompts, as learnt from its answers (``router/pace.py``). Seconds."""

    base: float  # of any first token: a step that is under way, the way there and back
    token: float  # per prompt token that has to be computed
    token_decode: float  # more per such token, for each request that decodes meanwhile
    pair: float  # per pair of a computed token and a token before it (attention)
    known: bool  # learnt, not assumed


ASSUMED = Pace(base=0.05, token=1e-4, token_decode=1e-6, pair=1e-9, known=False)
"""The pace of an engine nobody has an answer from: relative costs are right, seconds are a guess."""


class EngineLoad(NamedTuple):
    """One engine's load at one moment, as one request sees it.

    ``report`` is None when the engine never said anything or its last word is too old to be believed; the
    router's own counts are always true, for what this router sent. Tokens are prompt tokens that the engine
    has to compute: those that its cache was thought to hold are left out.
    """

    engine_id: str
    in_flight: int = 0  # requests of this router that have not ended
    queued: int = 0  # those of them without any output yet
    queued_tokens: int = 0  # tokens of those
    queued_pairs: float = 0.0  # token pairs that their attention computes
    report: LoadReport | None = None
    requests_since: int = 0  # requests sent minus requests ended since the report was asked for
    tokens_since: int = 0  # tokens sent minus tokens started since then
    cached_tokens: int = 0  # of this request's prompt, tokens that the engine's cache is thought to hold
    sticky: bool = False  # this request's session was here last
    pace: Pace = ASSUMED

    def waiting_tokens(self) -> int:
        """Tokens before a new request: what this router knows to be there, or the report where it is more."""
        if self.report is None:
            return self.queued_tokens
        return max(self.queued_tokens, self.report.waiting_tokens + self.tokens_since, 0)

    def requests(self) -> int:
        """Requests on the engine, waiting ones included; never below what this router knows to be there."""
        if self.report is None:
            return self.in_flight
        return max(self.in_flight, self.report.running + self.report.waiting + self.requests_since)

    def decoding(self) -> int:
        """Requests that produce output now."""
        own = self.in_flight - self.queued
        return own if self.report is None else max(own, min(self.report.running, self.requests()))


class PrefixView(StrEnum):
    """Which knowledge of prefix caches fills ``EngineLoad.cached_tokens``."""

    NONE = "none"
    APPROXIMATE = "approximate"  # what this router sent where
    PRECISE = "precise"  # what engines say in their KV events, and what was just sent


class Policy(ABC):
    """Chooses one of several engines that could all take the request."""

    name: ClassVar[str]
    prefix: ClassVar[PrefixView] = PrefixView.NONE
    learns: ClassVar[bool] = False  # wants the engines' pace
    sessions: ClassVar[bool] = False  # wants to know where a session was last

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The engines worth scoring; an empty answer means that all of them are."""
        return engines

    @abstractmethod
    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """The cost of sending ``request`` to ``engine``: finite, lower is better."""

    def scores(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> list[float]:
        """The score of each of ``engines``; for a policy to which it matters how all of them are."""
        return [self.score(request, engine) for engine in engines]

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
    return kept[policy.choose(kept, policy.scores(request, kept), ticket)]
