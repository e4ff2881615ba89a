"""Notices a peer that is frozen or out of reach: a ping after silence, and an end where nothing comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Life:
    """Watches one connection; whoever reads from it sets ``heard_at`` (loop seconds) with each read.

    ``time`` seconds of silence lead to ``ping()``; ``timeout`` seconds more to ``lost(reason)``. Anything that
    is read counts as life, an answer to the ping or not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        time: float,
        timeout: float,
        ping: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self.heard_at = loop.time()
        self._loop = loop
        self._time = time
        self._timeout = timeout
        self._ping = ping
        self._lost = lost
        self._alarm = loop.call_later(time, self._listen)

    def stop(self) -> None:
        """Watch no longer."""
        self._alarm.cancel()

    def _listen(self) -> None:
        asked_at = self._loop.time()
        wait = self.heard_at + self._time - asked_at
        if wait > 0:
            self._alarm = self._loop.call_later(wait, self._listen)
            return
        self._alarm = self._loop.call_later(self._timeout, self._expect, asked_at)
        self._ping()

    def _expect(self, asked_at: float) -> None:
        if self.heard_at < asked_at:
            self._lost(f"the peer did not answer a ping within {self._timeout:g} s")
        else:
            self._alarm = self._loop.call_later(self._time, self._listen)
