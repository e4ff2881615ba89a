"""When a failed attempt may be repeated on another engine."""

from __future__ import annotations

import grpc

from npufleet.cluster.router.errors import attempts_for

_EARNED = 0.2  # retries that one success gives back


class RetryBudget:
    """Retries that all requests share.

    A broken engine costs a few retries; when everything fails, retrying only doubles the load, so the reserve
    runs dry and failures go to their clients at once. (The idea of retry throttling in gRFC A6.)
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._left = float(most)

    @property
    def left(self) -> float:
        """Retries in reserve."""
        return self._left

    def succeeded(self) -> None:
        """A request got its first output."""
        self._left = min(self._most, self._left + _EARNED)

    def take(self) -> bool:
        """Spend one retry; False where none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def worth_retrying(code: grpc.StatusCode, attempts_made: int, most: int) -> bool:
    """Whether a request that failed ``attempts_made`` times without output, now with ``code``, may go on."""
    return attempts_made < attempts_for(code, most)
