"""Engines that died, and what follows: when a model's next engine may start, and which NPUs are to blame.

Pure functions of a list of deaths, so that the rules can be tested without dying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 900.0
"""Deaths that lie longer back are forgiven."""

YOUNG_S = 60.0
"""An engine that dies so soon after it was ready may be one of a crash loop; one that lived longer is not."""

FREE_TRIES = 2
"""So many young deaths within the window are followed by a start at once."""

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0

FENCE_AFTER = 3
"""So many deaths within the window that involve one NPU fence it, if its engines fare better elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """An engine that ended and was not asked to."""

    at: float  # seconds on a monotonic clock
    model: str
    engine_id: str
    why: str
    lived: float = 0.0  # seconds that it was ready
    npus: tuple[str, ...] = ()  # those to blame: of the ranks that failed, or all of the engine


def recent(deaths: Iterable[Death], now: float) -> list[Death]:
    """Return the deaths within the window, oldest first."""
    return sorted((death for death in deaths if now - death.at <= WINDOW_S), key=lambda death: death.at)


def loop(deaths: Iterable[Death], model: str, now: float) -> list[Death]:
    """Return the deaths of ``model`` within the window that may be a crash loop."""
    return [death for death in recent(deaths, now) if death.model == model and death.lived < YOUNG_S]


def wait_before_start(deaths: Iterable[Death], model: str, now: float) -> float:
    """Return how many seconds the next engine of ``model`` has to wait: 0 at first, then twice as long after
    each death.
    """
    own = loop(deaths, model, now)
    if len(own) <= FREE_TRIES:
        return 0.0
    wait: float = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (len(own) - FREE_TRIES - 1))
    return max(0.0, wait - (now - own[-1].at))


def to_fence(deaths: Iterable[Death], now: float) -> frozenset[str]:
    """Return the NPUs that are to blame for the deaths within the window.

    An NPU is, if at least ``FENCE_AFTER`` deaths involve it and most deaths of the models that died on it do: a
    model that dies everywhere has a fault of its own. An NPU is free again when its deaths lie outside the
    window, or when the model goes on dying on others.
    """
    window = recent(deaths, now)
    blamed = Counter(npu for death in window for npu in set(death.npus))
    found = set()
    for npu, count in blamed.items():
        if count < FENCE_AFTER:
            continue
        models = {death.model for death in window if npu in death.npus}
        of_models = sum(death.model in models for death in window)
        if 2 * count > of_models:
            found.add(npu)
    return frozenset(found)


def fenced_until(deaths: Iterable[Death], now: float) -> dict[str, float]:
    """Return the NPUs that are to blame with the time at which too few of their deaths lie within the window."""
    window = recent(deaths, now)
    return {
        npu: [death.at for death in window if npu in death.npus][-FENCE_AFTER] + WINDOW_S
        for npu in to_fence(window, now)
    }
