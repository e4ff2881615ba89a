"""A session stays on the engine that it was on last, as long as that engine can take requests.

New engines move no session. A request without a session, or whose engine is gone, goes where the least work
is waiting. Where a session was is remembered by the decider (``router/sessions.py``), bounded and with an end.
"""

from __future__ import annotations

from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.policies.least_load import waiting_work


class StickySession(Policy):
    """The session's engine, else the one with the least work."""

    name = "sticky-session"
    sessions = True

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The session's engine alone where there is one."""
        return [engine for engine in engines if engine.sticky]

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Work before a new request, in prompt tokens."""
        return waiting_work(engine)
