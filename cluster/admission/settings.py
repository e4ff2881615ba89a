"""What the router admits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """Times are seconds. 0 switches a limit off where the comment says so; less than 0 is a ValueError."""

    ttft_objective: float = 0.0  # a request whose predicted first token is later is refused; 0: none is
    engine_slots: int = 1024  # requests of this router on one engine before further ones wait here
    max_queue: int = 1024  # requests of one model that wait here before further ones are refused
    queue_timeout: float = 60.0  # how long one waits

    def __post_init__(self) -> None:
        if self.ttft_objective < 0:
            raise ValueError(f"ttft_objective must be 0 (none) or seconds, got {self.ttft_objective!r}")
        for name in ("engine_slots", "max_queue", "queue_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"admission setting {name} must be above 0, got {getattr(self, name)!r}")
