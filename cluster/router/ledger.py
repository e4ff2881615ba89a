"""What this router has sent to one engine and has not seen end.

An engine's own report is a second old on average and knows nothing of what was sent after it was asked for;
if only the report counted, a burst between two reports would go to one engine. So the ledger also keeps what
changed since the newest report was *asked for*: a request in that gap may count twice for a moment, never
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from npufleet.cluster.router.base import EngineLoad, LoadReport


@dataclass(slots=True)
class _Totals:
    """Running sums since the ledger was opened."""

    requests_sent: int = 0
    requests_ended: int = 0
    tokens_sent: int = 0
    tokens_started: int = 0  # their prompt has been computed, or their request has ended


@dataclass(frozen=True, slots=True)
class Mark:
    """The sums at the moment a report was asked for, and that moment in monotonic seconds."""

    totals: tuple[int, int]
    at: float


class Ledger:
    """Counts for one engine. ``clock`` is monotonic seconds."""

    def __init__(self, engine_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_id = engine_id
        self._clock = clock
        self._totals = _Totals()
        self._mark = Mark((0, 0), clock())
        self._report: LoadReport | None = None

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return self._totals.requests_sent - self._totals.requests_ended

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without any output yet."""
        return self._totals.tokens_sent - self._totals.tokens_started

    def sent(self, tokens: int) -> None:
        """A request with ``tokens`` prompt tokens goes to the engine."""
        self._totals.requests_sent += 1
        self._totals.tokens_sent += tokens

    def started(self, tokens: int) -> None:
        """Its first output came back."""
        self._totals.tokens_started += tokens

    def ended(self, tokens: int, *, started: bool) -> None:
        """It ended, with or without any output."""
        self._totals.requests_ended += 1
        if not started:
            self._totals.tokens_started += tokens

    def mark(self) -> Mark:
        """Take the mark for a report that is about to be asked for."""
        return Mark((self.in_flight, self.queued_tokens), self._clock())

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

    def load(self, ttl: float) -> EngineLoad:
        """The engine's load now; a report older than ``ttl`` seconds is left out."""
        age = self.report_age()
        fresh = age is not None and age <= ttl
        in_flight, queued = self.in_flight, self.queued_tokens
        return EngineLoad(
            engine_id=self._engine_id,
            in_flight=in_flight,
            queued_tokens=queued,
            report=self._report if fresh else None,
            requests_since=in_flight - self._mark.totals[0] if fresh else 0,
            tokens_since=queued - self._mark.totals[1] if fresh else 0,
        )
