"""Where each session was last, bounded in number and in time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class Sessions:
    """Engine ids by session; the longest unused go beyond ``limit``, and those idle for ``idle`` seconds."""

    def __init__(
        self, *, limit: int = 200_000, idle: float = 4 * 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._idle = idle
        self._clock = clock
        self._last: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def engine(self, session: str) -> str:
        """The session's engine, "" where there is none."""
        found = self._last.get(session)
        if found is None or found[1] < self._clock() - self._idle:
            return ""
        return found[0]

    def put(self, session: str, engine_id: str) -> None:
        """The session is on that engine now."""
        now = self._clock()
        self._last[session] = (engine_id, now)
        self._last.move_to_end(session)
        while len(self._last) > self._limit or next(iter(self._last.values()))[1] < now - self._idle:
            self._last.popitem(last=False)
