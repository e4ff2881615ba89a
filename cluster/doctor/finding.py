"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"  # it will run, with a limit that the text names
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: what it looked at, how it came out, and what to do if it failed."""

    name: str
    level: Level
    text: str
    remedy: str = ""
