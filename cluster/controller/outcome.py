"""How a change of the fleet stands: a pure function of what is wanted and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..endpoints import EngineEndpoint, EngineState
from .progress import EngineProgress, Phase


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is at one moment."""

    endpoints: tuple[EngineEndpoint, ...]
    progress: tuple[EngineProgress, ...]
    given_up: Mapping[str, str] = field(
        default_factory=dict
    )  # model -> why Serve starts no more engines of it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether a change is over, and what it waits for or why it failed."""

    over: bool
    failed: bool = False
    detail: str = ""


def outcome(wanted: Mapping[str, tuple[str, int]], look: Look) -> Outcome:
    """Say how the change to ``wanted`` stands.

    Args:
        wanted: by model deployment, the generation of its engines and how many there shall be.
        look: what there is.
    """
    failure = _failure(wanted, look)
    if failure:
        return Outcome(over=True, failed=True, detail=failure)
    waits = []
    for model, (generation, count) in wanted.items():
        there = [endpoint for endpoint in look.endpoints if endpoint.model == model]
        ready = sum(e.generation == generation and e.state is EngineState.READY for e in there)
        if ready < count:
            waits.append(f"{model}: {ready} of {count} engines ready")
        elif len(there) > count:
            waits.append(f"{model}: {len(there) - count} engines drain")
    leaving = sum(endpoint.model not in wanted for endpoint in look.endpoints)
    if leaving:
        waits.append(f"{leaving} engines of removed models drain")
    return Outcome(over=not waits, detail="; ".join(waits))


def _failure(wanted: Mapping[str, tuple[str, int]], look: Look) -> str:
    """Return why engines of a wanted generation cannot come up, empty if they may."""
    failed: dict[tuple[str, str], int] = {}
    for entry in look.progress:
        generation, count = wanted.get(entry.model, ("", 0))
        if not count or entry.generation != generation:
            continue
        told = f"model {entry.model!r}: {entry.detail}"
        if entry.phase is Phase.REFUSED:
            return told
        if entry.phase is Phase.FAILED:
            failed[entry.model, told] = failed.get((entry.model, told), 0) + 1
            if failed[entry.model, told] > 1:  # twice the same: a third try would end so too
                return told
    for model, why in look.given_up.items():
        if wanted.get(model, ("", 0))[1]:
            return f"model {model!r}: {why}"
    return ""
