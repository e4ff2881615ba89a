"""A rate limit in tokens."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """``per_minute`` tokens flow in, at most a minute's worth stays.

    A request is let in while the bucket is not empty of what it needs at once (its prompt, at most a full bucket);
    what it then costs more, its answer, may take the bucket below zero, and whoever comes next waits for it.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert per_minute > 0, per_minute
        self._rate = per_minute / 60.0
        self._most = float(per_minute)
        self._left = self._most
        self._clock = clock
        self._at = clock()

    @property
    def left(self) -> float:
        """Tokens in it now; below zero where answers took more than there was."""
        self._flow()
        return self._left

    def take(self, tokens: float) -> float:
        """Take ``tokens`` and return 0, or take none and return the seconds after which asking again helps."""
        self._flow()
        needed = min(tokens, self._most)
        if self._left < needed:
            return (needed - self._left) / self._rate
        self._left -= tokens
        return 0.0

    def charge(self, tokens: float) -> None:
        """Take ``tokens`` that were used already."""
        self._flow()
        self._left -= tokens

    def _flow(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
