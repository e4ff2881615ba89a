"""What the router admits."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet.cluster import checks

_DAY = 86400.0
_MOST = 1 << 30


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """Times are seconds. 0 switches a limit off where the comment says so; others are a ValueError."""

    ttft_objective: float = 0.0  # a request whose predicted first token is later is refused; 0: none is
    engine_slots: int = 1024  # requests of this router on one engine before further ones wait here
    max_queue: int = 1024  # requests of one model that wait here before further ones are refused
    queue_timeout: float = 60.0  # how long one waits

    def __post_init__(self) -> None:
        checks.number(self.ttft_objective, "ttft_objective", 0.0, _DAY)
        checks.integer(self.engine_slots, "engine_slots", 1, _MOST)
        checks.integer(self.max_queue, "max_queue", 1, _MOST)
        if not checks.number(self.queue_timeout, "queue_timeout", 0.0, _DAY) > 0.0:
            raise ValueError("queue_timeout: expected seconds above 0, got 0")
