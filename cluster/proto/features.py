"""How an engine says which extension fields it understands.

Two headers in the initial metadata of ``GetServerInfo`` and ``GetModelInfo``:

- ``x-npufleet-features``: comma-separated names of the extension fields it reads (``extension.py``);
- ``x-npufleet-limits``: ``name=integer`` pairs, comma-separated, for limits that the messages lack
  (``max_logprobs``).

A stock VllmEngine server sends neither and so supports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .extension import FIELDS

FEATURES_KEY = "x-npufleet-features"
LIMITS_KEY = "x-npufleet-limits"


@dataclass(frozen=True, kw_only=True)
class EngineFeatures:
    """What one engine understands beyond the VllmEngine messages."""

    fields: frozenset[str] = frozenset()
    limits: Mapping[str, int] = field(default_factory=dict)

    def lacking(self, wanted: Iterable[str]) -> list[str]:
        """The names in ``wanted`` that this engine does not understand, sorted."""
        return sorted(set(wanted) - self.fields)


def advertise(limits: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The headers of an engine that reads every field of this version."""
    return (
        (FEATURES_KEY, ",".join(sorted(FIELDS))),
        (LIMITS_KEY, ",".join(f"{name}={value}" for name, value in sorted(limits.items()))),
    )


def read(metadata: Iterable[tuple[str, str | bytes]] | None) -> EngineFeatures:
    """The features in the initial metadata of an answer; unreadable limits are left out."""
    names: frozenset[str] = frozenset()
    limits: dict[str, int] = {}
    for key, value in metadata or ():
        if not isinstance(value, str):
            continue
        if key == FEATURES_KEY:
            names = frozenset(name for name in value.split(",") if name)
        elif key == LIMITS_KEY:
            for pair in value.split(","):
                name, _, number = pair.partition("=")
                if number.lstrip("-").isdigit():
                    limits[name] = int(number)
    return EngineFeatures(fields=names, limits=limits)
