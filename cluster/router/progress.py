"""Whether an engine gets on with its work, and whether its answers are worth waiting for.

An engine whose core is frozen behind a server that still answers health checks is seen only by its silence; one
whose every answer is an error only by those.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """The silence of one engine. ``clock`` is monotonic seconds."""

    def __init__(self, stall: float, first_stall: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``stall``: seconds without any message while requests decode that say it is stuck; ``first_stall``: while
        all its requests still wait for their first message, which a long prompt may take long for.
        """
        self._stall = stall
        self._first_stall = first_stall
        self._clock = clock
        self._heard_at = clock()

    def heard(self) -> None:
        """A message of a request came."""
        self._heard_at = self._clock()

    def silent_for(self, in_flight: int, queued: int) -> float:
        """Seconds of a silence that is too long for ``in_flight`` requests, ``queued`` of them without an answer yet;
        0 where it is not. To be asked regularly: an engine without requests is not silent.
        """
        now = self._clock()
        if not in_flight:
            self._heard_at = now
            return 0.0
        silent = now - self._heard_at
        return silent if silent > (self._stall if in_flight > queued else self._first_stall) else 0.0


class Breaker:
    """Counts failures in a row. Only what the engine did counts: not what clients caused, not a lost connection."""

    def __init__(self, failures: int) -> None:
        self._most = failures
        self._left = failures

    def failed(self) -> bool:
        """One more request failed; True where it is time to let the engine rest.

        After a rest the next failure is one too many again, until a request succeeds.
        """
        self._left -= 1
        if self._left > 0:
            return False
        self._left = 1
        return True

    def succeeded(self) -> None:
        """A request got its answer."""
        self._left = self._most
