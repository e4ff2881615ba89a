"""``models[].engines`` as a mapping: bounds, and the objectives that the number of engines is to hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .. import checks

MOST = 4096
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>ms|s|m)")


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What nine of ten requests are to see, seconds; None where nothing is asked for."""

    ttft_p90: float | None = None  # from a request to its first token
    tpot_p90: float | None = None  # between two tokens


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Between how many engines a model deployment may have."""

    min: int
    max: int
    objectives: Objectives = Objectives()

    def clamp(self, engines: int) -> int:
        """Return the number nearest to ``engines`` that is allowed."""
        return max(self.min, min(self.max, engines))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :func:`parse` reads back."""
        told = {"ttft_p90": self.objectives.ttft_p90, "tpot_p90": self.objectives.tpot_p90}
        objectives = {name: value for name, value in told.items() if value is not None}
        return {"min": self.min, "max": self.max, "objectives": objectives}


def parse(data: object, where: str) -> Bounds:
    """Return the bounds that ``data`` describes.

    Raises:
        ValueError: naming the place, what was given and what is allowed.
    """
    given = checks.mapping(data, where, ("min", "max", "objectives"))
    low = checks.integer(given.get("min", 1), f"{where}.min", 0, MOST)
    high = checks.integer(given.get("max"), f"{where}.max", 1, MOST)
    if low > high:
        raise ValueError(f"{where}: min is {low}, above max, which is {high}")
    asked = checks.mapping(given.get("objectives", {}), f"{where}.objectives", ("ttft_p90", "tpot_p90"))
    found = {name: _seconds(value, f"{where}.objectives.{name}") for name, value in asked.items()}
    return Bounds(min=low, max=high, objectives=Objectives(**found))


def _seconds(value: object, where: str) -> float:
    """Return a duration in seconds: a number of them, or a text such as ``50ms`` or ``2s``."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    seconds = float(match["number"]) * _UNITS[match["unit"]] if match else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 3600:
        raise ValueError(
            f"{where}: expected a time such as 50ms or 2s, at most an hour, got {checks.shown(value)}"
        )
    return float(seconds)
