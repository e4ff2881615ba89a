"""Whose fault silence is: that of an engine, or of this process, which hears nobody.

The controller itself may have been halted. And calls through Serve wait for one another (seen with Ray 2.60): a caller
that hangs holds back the heartbeats of all. Engines that are well must not be forgotten for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from .registry import HEARTBEAT_S, SILENT_S

LATE_S = 3.0
"""A look that comes so much later than it should says that this process was halted."""


@dataclass(kw_only=True)
class Hearing:
    """What this process could have heard; times are seconds on a monotonic clock."""

    period: float
    """Seconds between two looks."""

    heard: float
    """When anybody was heard last."""

    looked: float
    """When the last look ended."""

    _fair: float = 0.0

    def fair(self, now: float) -> bool:
        """Return whether who is silent ``now`` could have been heard for two heartbeats."""
        if now - self.looked > self.period + LATE_S or now - self.heard > SILENT_S:
            self._fair = now + 2 * HEARTBEAT_S
        return now > self._fair
