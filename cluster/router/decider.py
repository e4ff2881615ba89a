"""From a request to an engine, without any connection: what the picker and the fleet simulator share.

A decider holds one policy and, per model deployment, what that policy wants to know: prefix blocks, paces,
where sessions are. A :class:`Claim` is one request's place on one engine; it keeps all of that up to date.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from npufleet.cluster.router.base import ASSUMED, EngineLoad, Policy, PrefixView, RequestInfo, decide
from npufleet.cluster.router.ledger import Ledger
from npufleet.cluster.router.pace import PaceBook, Sight
from npufleet.cluster.router.policies.chance import mix
from npufleet.cluster.router.prefix.base import PrefixSource, Some
from npufleet.cluster.router.prefix.guess import PrefixGuess
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.sessions import Sessions
from npufleet.cluster.router.split.base import Stage

UNKNOWN_PROMPT_TOKENS = 1024  # what a prompt of unknown length counts for

ALL = 64  # engines up to which each is looked at
BEST = 24  # beyond: those that hold most of the prompt, and
DRAWN = 40  # as many drawn by chance, among which the idle ones are
ALONE = 0.7  # share of the engines' requests from which on a router counts as the only one
FEW = 2  # engines of either kind at least, where it is not


@dataclass(eq=False, slots=True)
class _Model:
    """What is known of one model deployment."""

    prefix: PrefixSource | None
    paces: PaceBook
    sessions: Sessions
    tickets: Counter[Stage] = field(default_factory=Counter)  # each stage has engines and a turn of its own


class Claim:
    """One request on one engine. Call :meth:`started` at the first output and :meth:`ended` at the end."""

    __slots__ = ("_decider", "_expectation", "_model", "_open", "_pairs", "_sent_at", "_sight", "_started",
                 "_tokens", "cached_tokens", "ledger")  # fmt: skip

    def __init__(
        self, decider: Decider, model: _Model, ledger: Ledger, load: EngineLoad, info: RequestInfo
    ) -> None:
        prompt = info.prompt_tokens or UNKNOWN_PROMPT_TOKENS
        self.cached_tokens = min(load.cached_tokens, prompt - 1)
        self._decider, self._model, self.ledger = decider, model, ledger
        self._tokens = prompt - self.cached_tokens
        self._pairs = self._tokens * (self.cached_tokens + self._tokens / 2)
        self._sight = Sight(
            load.waiting_tokens() + self._tokens, load.decoding(), load.queued_pairs + self._pairs
        )
        self._started = False
        self._open = True
        self._sent_at = decider.clock()
        self._expectation: object = None
        if model.prefix is not None and info.prompt is not None:
            self._expectation = model.prefix.expect(ledger.engine_id, info.prompt)
        ledger.sent(self._tokens, self._pairs)

    @property
    def engine_id(self) -> str:
        """The engine."""
        return self.ledger.engine_id

    def started(self) -> None:
        """The first output came back: the prompt is no longer queued. Further calls change nothing."""
        if not self._open or self._started:
            return
        self._started = True
        self.ledger.started(self._tokens, self._pairs)
        if self._decider.learns:
            seconds = self._decider.clock() - self._sent_at
            self._model.paces.learn(self.engine_id, self._sight, seconds)
        if self._expectation is not None and self._model.prefix is not None:
            self._model.prefix.started(self._expectation)

    def ended(self) -> bool:
        """The request ended; False where that was known already."""
        if not self._open:
            return False
        self._open = False
        self.ledger.ended(self._tokens, self._pairs, started=self._started)
        if self._expectation is not None and self._model.prefix is not None:
            self._model.prefix.ended(self._expectation)
        return True


class Decider:
    """Chooses among ledgers with one policy. Belongs to one event loop."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        *,
        learns: bool = False,
        guess_block: int = 128,
        salt: int | None = None,
    ) -> None:
        """``learns``: learn the engines' paces though the policy does not ask for them; ``guess_block``: tokens
        per block where engines do not tell theirs; ``salt`` decides what is left to chance, differently in each
        router.
        """
        self.policy = policy
        self.learns = policy.learns or learns
        self.clock = clock
        self._guess_block = guess_block
        self._models: dict[str, _Model] = {}
        self._salt = secrets.randbits(63) if salt is None else salt

    def index(self, model: str) -> PrefixIndex | None:
        """The index that wants the KV events of the model's engines, None where the policy does not."""
        prefix = self._model(model).prefix
        return prefix if isinstance(prefix, PrefixIndex) else None

    def paces(self, model: str) -> PaceBook:
        """What is known of the paces of the model's engines."""
        return self._model(model).paces

    def forget(self, model: str, engine_id: str) -> None:
        """The engine is gone."""
        known = self._model(model)
        known.paces.forget(engine_id)
        if known.prefix is not None:
            known.prefix.drop(engine_id)

    def choose(self, model: str, info: RequestInfo, ledgers: Sequence[Ledger], ttl: float) -> Claim:
        """Claim the best of ``ledgers`` (at least one, in a stable order) for ``info``.

        A load report older than ``ttl`` seconds is not believed.
        """
        known = self._model(model)
        loads = self.look(model, info, ledgers, ttl)
        ticket = known.tickets[info.stage]
        known.tickets[info.stage] += 1
        chosen = decide(self.policy, info, loads, ticket)
        ledger = next(ledger for ledger in ledgers if ledger.engine_id == chosen.engine_id)
        if self.policy.sessions and info.session:
            known.sessions.put(info.session, ledger.engine_id)
        return Claim(self, known, ledger, chosen, info)

    def look(self, model: str, info: RequestInfo, ledgers: Sequence[Ledger], ttl: float) -> list[EngineLoad]:
        """The snapshot that the policy decides on.

        Of a large fleet a policy that reads prefix caches sees only those engines that hold most of the prompt
        and some others by chance: the best of forty is hardly worse than the best of a thousand, and looking at
        each would take longer than many a prompt. Where other routers send to the same engines, chance also
        keeps all of them from taking the same engine at once: each looks at as many as are its share.
        """
        known, policy = self._model(model), self.policy
        some = self._some(known.tickets[info.stage], ledgers) if known.prefix is not None else None
        cached = known.prefix.match(info.prompt, some) if known.prefix is not None and info.prompt else {}
        if some is not None:
            ledgers = [one for one in ledgers if one.engine_id in cached or one.engine_id in some.also]
        stuck = known.sessions.engine(info.session) if policy.sessions and info.session else ""
        paces = known.paces
        return [
            ledger.load(
                ttl,
                cached=cached.get(ledger.engine_id, 0),
                sticky=ledger.engine_id == stuck,
                pace=paces.of(ledger.engine_id) if self.learns else ASSUMED,
            )
            for ledger in ledgers
        ]

    def _some(self, ticket: int, ledgers: Sequence[Ledger]) -> Some | None:
        """Which engines to look at; None for all of them."""
        count, best, draws = len(ledgers), BEST, DRAWN
        share = self._share(ledgers)
        if share < ALONE and count > 2 * FEW:
            best, draws = FEW, max(FEW, min(DRAWN, round(count * share)))
        elif count <= ALL:
            return None
        at, drawn = mix(self._salt ^ ticket), set[str]()
        while len(drawn) < draws:
            at += 1
            drawn.add(ledgers[mix(at) % count].engine_id)
        return Some(best, drawn)

    @staticmethod
    def _share(ledgers: Sequence[Ledger]) -> float:
        """Which part of the requests that engines report this router had sent; 1 where nothing tells of others."""
        own = there = 0
        for ledger in ledgers:
            report = ledger.report
            if report is not None:
                own += ledger.in_flight_at_report
                there += report.running + report.waiting
        return own / there if there > len(ledgers) and own < there else 1.0

    def _model(self, model: str) -> _Model:
        known = self._models.get(model)
        if known is None:
            view = self.policy.prefix
            prefix: PrefixSource | None = None
            if view is PrefixView.PRECISE:
                prefix = PrefixIndex(clock=self.clock)
            elif view is PrefixView.APPROXIMATE:
                prefix = PrefixGuess(block_size=self._guess_block, clock=self.clock)
            known = self._models[model] = _Model(prefix, PaceBook(), Sessions(clock=self.clock))
        return known
