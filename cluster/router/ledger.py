"""What this router has sent to one engine and has not seen end.

An engine's own report is a second old on average and knows nothing of what was sent after it was asked for;
if only the report counted, a burst between two reports would go to one engine. So the ledger also keeps what
changed since the newest report was *asked for*: a request in that gap may count twice for a moment, never
not. A report that an engine pushes by itself was not asked for; it counts as asked for a little before it
arrived, which is why the ledger remembers the last moments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from npufleet.cluster.router.base import ASSUMED, EngineLoad, LoadReport, Pace

_MEMORY = 5.0  # seconds of sums that are remembered, and how often one is kept
_GRAIN = 0.02


@dataclass(slots=True)
class _Totals:
    """Running sums since the ledger was opened."""

    requests_sent: int = 0
    requests_ended: int = 0
    requests_started: int = 0  # ended ones included
    tokens_sent: int = 0
    tokens_started: int = 0  # their prompt has been computed, or their request has ended
    pairs_queued: float = 0.0


class Share(NamedTuple):
    """What one router has on one engine now."""

    in_flight: int = 0
    queued: int = 0
    queued_tokens: int = 0
    queued_pairs: float = 0.0


NOTHING = Share()


class Peers(Protocol):
    """Further routers over the same engines that tell each other what they have on them."""

    def others(self, engine_id: str) -> Share:
        """What all others have on the engine."""

    def tell(self, engine_id: str, share: Share) -> None:
        """What this one has on it now."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The sums at the moment a report was asked for, and that moment in monotonic seconds."""

    totals: tuple[int, int]
    at: float


class Ledger:
    """Counts for one engine, or one data-parallel rank of one. ``clock`` is monotonic seconds."""

    def __init__(
        self,
        engine_id: str,
        clock: Callable[[], float] = time.monotonic,
        others: Callable[[], Share] | None = None,
        tell: Callable[[Share], None] | None = None,
        rank: int | None = None,
    ) -> None:
        """``rank``: which data-parallel rank of an engine this is, ``engine_id`` being the rank's own; None: the
        engine is not split. ``others()`` is what further routers have on it now, ``tell(share)`` tells them of
        each change here; None: there are none.
        """
        self.engine_id = engine_id
        self.rank = rank
        self._others = others
        self._tell = tell
        self._clock = clock
        self._totals = _Totals()
        self._mark = Mark((0, 0), clock())
        self._past: deque[Mark] = deque()  # sums just before changes
        self._report: LoadReport | None = None

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return self._totals.requests_sent - self._totals.requests_ended

    @property
    def report(self) -> LoadReport | None:
        """The newest report, however old."""
        return self._report

    @property
    def in_flight_at_report(self) -> int:
        """Requests of this router in flight when the newest report was asked for."""
        return self._mark.totals[0]

    @property
    def queued(self) -> int:
        """Requests without any output yet."""
        return self._totals.requests_sent - self._totals.requests_started

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute for requests without any output yet."""
        return self._totals.tokens_sent - self._totals.tokens_started

    def share(self) -> Share:
        """What this router alone has on the engine, for others to count."""
        return Share(self.in_flight, self.queued, self.queued_tokens, self._totals.pairs_queued)

    def sent(self, tokens: int, pairs: float = 0.0) -> None:
        """A request goes to the engine, which has to compute ``tokens`` prompt tokens of it and ``pairs``
        token pairs.
        """
        self._remember()
        self._totals.requests_sent += 1
        self._totals.tokens_sent += tokens
        self._totals.pairs_queued += pairs
        if self._tell is not None:
            self._tell(self.share())

    def started(self, tokens: int, pairs: float = 0.0) -> None:
        """Its first output came back."""
        self._remember()
        self._totals.requests_started += 1
        self._totals.tokens_started += tokens
        self._totals.pairs_queued = max(0.0, self._totals.pairs_queued - pairs) if self.queued else 0.0
        if self._tell is not None:
            self._tell(self.share())

    def ended(self, tokens: int, pairs: float = 0.0, *, started: bool) -> None:
        """It ended, with or without any output."""
        if not started:
            self.started(tokens, pairs)
        self._remember()
        self._totals.requests_ended += 1
        if self._tell is not None:
            self._tell(self.share())

    def mark(self) -> Mark:
        """Take the mark for a report that is about to be asked for."""
        return Mark(self._all(), self._clock())

    def mark_before(self, seconds: float) -> Mark:
        """The mark of ``seconds`` ago, for a report that came unasked."""
        at = self._clock() - seconds
        for mark in self._past:
            if mark.at >= at:
                return Mark(mark.totals, at)
        return Mark(self._all(), at)

    def take(self, report: LoadReport, mark: Mark) -> None:
        """Believe ``report``, which answers the question asked at ``mark``, unless a newer one is here."""
        if mark.at >= self._mark.at:
            self._report, self._mark = report, mark

    def forget(self) -> None:
        """The engine was lost: what it once reported means nothing any more."""
        self._report = None

    def report_age(self) -> float | None:
        """Seconds since the newest report was asked for; None without a report."""
        return None if self._report is None else self._clock() - self._mark.at

    def load(self, ttl: float, *, cached: int = 0, sticky: bool = False, pace: Pace = ASSUMED) -> EngineLoad:
        """The engine's load now; a report older than ``ttl`` seconds is left out.

        ``cached``, ``sticky`` and ``pace`` are what is known about the engine for one request.
        """
        totals, others = self._totals, NOTHING
        if self._others is not None:
            others = self._others()
            self._remember()  # what they do is seen by looking alone
        in_flight = totals.requests_sent - totals.requests_ended + others.in_flight
        queued_tokens = totals.tokens_sent - totals.tokens_started + others.queued_tokens
        report, mark = self._report, self._mark.totals
        if report is not None and self._clock() - self._mark.at > ttl:
            report = None
        return EngineLoad(
            self.engine_id,
            in_flight,
            totals.requests_sent - totals.requests_started + others.queued,
            queued_tokens,
            totals.pairs_queued + others.queued_pairs,
            report,
            in_flight - mark[0] if report is not None else 0,
            queued_tokens - mark[1] if report is not None else 0,
            cached,
            sticky,
            pace,
        )

    def _all(self) -> tuple[int, int]:
        """Requests in flight and tokens queued, those of others included."""
        others = NOTHING if self._others is None else self._others()
        return self.in_flight + others.in_flight, self.queued_tokens + others.queued_tokens

    def _remember(self) -> None:
        """Keep the sums as they are before a change."""
        now = self._clock()
        if not self._past or now - self._past[-1].at >= _GRAIN:
            self._past.append(Mark(self._all(), now))
            while self._past[0].at < now - _MEMORY:
                self._past.popleft()
