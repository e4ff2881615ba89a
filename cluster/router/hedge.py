"""Hedging: ask a second engine where the first one takes longer than nearly all requests of its kind do.

Only for short calls without a stream: their answer comes in one piece, so nothing has been sent when the second engine
is asked, and asking twice is cheap. The one that answers first wins, the other call is cancelled. A budget bounds what
hedging adds, so that it never feeds an overload. (The idea: Dean and Barroso, The Tail at Scale, CACM 2013.)
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from npufleet.cluster import checks
from npufleet.cluster.router.wire import pb

_MEMORY = 256  # answers that the percentile is taken from
_ENOUGH = 32  # before it is believed
_RESERVE = 8.0  # hedges that may come at once
_MOST = 1 << 30  # tokens


@dataclass(frozen=True, kw_only=True)
class HedgeSettings:
    """Which requests are hedged. ValueError for values that make no sense."""

    max_tokens: int = 0  # answers of at most so many tokens; 0: none
    max_prompt_tokens: int = 1024  # to prompts of at most so many
    percentile: float = 0.95  # of the times that such requests take, after which a second engine is asked
    budget: float = 0.05  # second requests per request of the kind, at most

    def __post_init__(self) -> None:
        checks.integer(self.max_tokens, "max_tokens", 0, _MOST)
        checks.integer(self.max_prompt_tokens, "max_prompt_tokens", 1, _MOST)
        if not checks.number(self.percentile, "percentile", 0.5, 1.0) < 1.0:
            raise ValueError("percentile: expected a number from 0.5 to below 1, got 1")
        if not checks.number(self.budget, "budget", 0.0, 1.0) > 0.0:
            raise ValueError("budget: expected a number above 0 and at most 1, got 0")

    def wanted(self, request: pb.GenerateRequest, prompt_tokens: int) -> bool:
        """Whether ``request`` is of the kind."""
        params = request.sampling_params
        short = params.HasField("max_tokens") and params.max_tokens <= self.max_tokens
        return short and not request.stream and prompt_tokens <= self.max_prompt_tokens


@dataclass(slots=True)
class _Kind:
    """The short requests of one model deployment."""

    recent: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)
    left: float = _RESERVE


class Try(Protocol):
    """One engine's attempt at a request; cancelling its task ends it there and gives its lease back."""

    def drop(self) -> None:
        """It was answered, and nobody wants the answer."""


T = TypeVar("T", bound=Try)


class Hedges:
    """When to ask a second engine, per model deployment. ``on_hedge(model, outcome)`` counts won, lost, over_budget."""

    def __init__(self, settings: HedgeSettings, on_hedge: Callable[[str, str], None]) -> None:
        self.settings = settings
        self.on_hedge = on_hedge
        self._kinds: dict[str, _Kind] = {}

    def delay(self, model: str) -> float | None:
        """A request of the kind begins: seconds after which a second engine shall be asked, None while too little is
        known.
        """
        kind = self._kinds.setdefault(model, _Kind())
        kind.left = min(_RESERVE, kind.left + self.settings.budget)
        count = len(kind.ordered)
        return kind.ordered[int(self.settings.percentile * count)] if count >= _ENOUGH else None

    def learn(self, model: str, seconds: float) -> None:
        """Such a request was answered after ``seconds``, by whichever engine."""
        kind = self._kinds.setdefault(model, _Kind())
        if len(kind.recent) >= _MEMORY:
            del kind.ordered[bisect_left(kind.ordered, kind.recent.popleft())]
        kind.recent.append(seconds)
        insort(kind.ordered, seconds)

    def take(self, model: str) -> bool:
        """Spend one second request; False where none is left."""
        kind = self._kinds.setdefault(model, _Kind())
        if kind.left < 1.0:
            self.on_hedge(model, "over_budget")
            return False
        kind.left -= 1.0
        return True

    async def run(
        self,
        model: str,
        first: Awaitable[T],
        delay: float | None,
        second: Callable[[], Awaitable[Awaitable[T] | None]],
    ) -> T:
        """The answer of ``first``, or of what ``second()`` begins where it is not there ``delay`` seconds later and the
        budget has one left. What ``first`` raises where neither answers.
        """
        if delay is None:
            return await first

        async def within_budget() -> Awaitable[T] | None:
            return await second() if self.take(model) else None

        opened, second_won = await race(first, delay, within_budget)
        if second_won is not None:
            self.on_hedge(model, "won" if second_won else "lost")
        return opened


async def race(
    first: Awaitable[T], delay: float, second: Callable[[], Awaitable[Awaitable[T] | None]]
) -> tuple[T, bool | None]:
    """The answer of ``first``, or of what ``second()`` begins after ``delay`` seconds (None: nobody else may be asked),
    whichever is first, and whether the second one won (None: it was not asked). The other one is cancelled.

    Raises what ``first`` raised where neither answers.
    """
    tries = [asyncio.ensure_future(first)]
    won: asyncio.Future[T] | None = None
    kept: asyncio.Future[T] | None = None
    try:
        await asyncio.wait(tries, timeout=delay)
        if not tries[0].done() and (other := await second()) is not None:
            tries.append(asyncio.ensure_future(other))
        running = set(tries)
        while won is None and running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            won = next((one for one in tries if one in done and _answered(one)), None)
        if won is None:
            return await tries[0], None  # it raises
        others = [one for one in tries if one is not won and one.cancel()]
        await asyncio.gather(*others, return_exceptions=True)
        kept = won
        return won.result(), None if len(tries) == 1 else won is tries[1]
    finally:  # also where whoever waits here is cancelled, which may be while the slower one ends
        for one in tries:
            if one is not kept:
                _let_go(one)


def _let_go(one: asyncio.Future[T]) -> None:
    """Nobody wants the answer of ``one``, now or when it comes."""
    if not one.done():
        one.cancel()
        one.add_done_callback(_let_go)
    elif _answered(one):
        one.result().drop()


def _answered(one: asyncio.Future[T]) -> bool:
    return one.done() and not one.cancelled() and one.exception() is None
