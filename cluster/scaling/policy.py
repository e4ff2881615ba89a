"""How many engines a model deployment shall have: a pure function of its load, with hysteresis.

The load is told as one number, the pressure: how many times the engines that are ready would be needed. 1 means that
they just suffice. It is the largest of: the queue against what an engine may let wait, the fill of the KV cache, and
each latency against its objective. A queue that grows is taken for as long as it will be when an engine that starts
now is ready, so a model that takes long to start is given engines earlier.

More engines come when the pressure has been high for seconds, fewer when one less would still leave room and has for
minutes: a wrong start costs a little, a wrong stop costs a whole start-up to everybody who waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .bounds import Bounds

QUEUE = 4.0
"""Requests that may wait per engine at pressure 1."""

KV_FULL = 0.85
"""Fill of the KV cache at pressure 1: above it requests are soon preempted."""

HIGH, LOW = 1.1, 0.6
"""More engines above HIGH; one fewer where that would leave less than LOW."""

UP_AFTER_S = 10.0
DOWN_AFTER_S = 300.0
ZERO_AFTER_S = 600.0

GROWTH = 2.0
"""At most so many times as many engines in one step: the load is not known better than that."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of one model deployment now."""

    ready: int  # engines that take requests
    starting: int = 0
    running: int = 0  # requests
    waiting: int = 0  # requests that wait within engines
    refused: int = 0  # requests that found no engine since the last look
    kv_usage: float = 0.0  # mean fill of the KV caches, 0 to 1
    ttft_p90: float | None = None  # seconds, over the last minute or so; None without requests
    tpot_p90: float | None = None
    start_s: float = 60.0  # that an engine takes to start


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a decision needs to know of the looks before; times are seconds on a monotonic clock."""

    high_since: float | None = None
    low_since: float | None = None
    idle_since: float | None = None
    waiting: int = 0
    looked: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many engines there shall be, why if that changes, and what to remember."""

    engines: int
    why: str
    memory: Memory


def decide(bounds: Bounds, wanted: int, load: Load, memory: Memory, now: float) -> Decision:
    """Decide for one model deployment.

    Args:
        bounds: between how many engines, and the objectives.
        wanted: how many engines were decided before.
        load: the load now.
        memory: from the last decision.
        now: seconds on a monotonic clock.
    """
    pressure, cause = press(bounds, load, memory, now)
    memory = _remember(load, memory, pressure, wanted, now)
    if not bounds.min <= wanted <= bounds.max:
        return Decision(engines=bounds.clamp(wanted), why="the bounds changed", memory=memory)
    if wanted == 0:
        why = f"{load.refused} requests found no engine" if load.refused else ""
        return Decision(engines=1 if load.refused else 0, why=why, memory=memory)
    more = _more(bounds, wanted, load, pressure)
    if more > wanted and memory.high_since is not None and now - memory.high_since >= UP_AFTER_S:
        return Decision(engines=more, why=cause, memory=replace(memory, high_since=None))
    fewer = _fewer(bounds, wanted, load, memory, now)
    if fewer < wanted:
        why = "nothing was asked for a while" if fewer == 0 else f"one fewer still leaves room ({cause})"
        return Decision(engines=fewer, why=why, memory=replace(memory, low_since=None))
    return Decision(engines=wanted, why="", memory=memory)


def press(bounds: Bounds, load: Load, memory: Memory, now: float) -> tuple[float, str]:
    """Return the pressure on the engines that are ready, and what it comes from."""
    engines = max(1, load.ready)
    growth = 0.0
    if memory.looked is not None and now > memory.looked:
        growth = max(0.0, (load.waiting - memory.waiting) / (now - memory.looked))
    queue = load.waiting + growth * load.start_s
    found = [
        (queue / (QUEUE * engines), f"{load.waiting} requests wait for {load.ready} engines"),
        (load.kv_usage / KV_FULL, f"the KV cache is {load.kv_usage:.0%} full"),
    ]
    objectives = bounds.objectives
    for name, seen, asked in (
        ("TTFT", load.ttft_p90, objectives.ttft_p90),
        ("TPOT", load.tpot_p90, objectives.tpot_p90),
    ):
        if seen is not None and asked is not None:
            found.append((seen / asked, f"TTFT p90 is {seen:.3g} s of {asked:g}".replace("TTFT", name)))
    return max(found)


def _remember(load: Load, memory: Memory, pressure: float, wanted: int, now: float) -> Memory:
    future = pressure * load.ready / max(1, load.ready + load.starting)
    one_less = pressure * load.ready / max(1, wanted - 1)
    idle = not (load.running or load.waiting or load.refused)
    return Memory(
        high_since=_since(memory.high_since, future > HIGH, now),
        low_since=_since(memory.low_since, wanted > 1 and not load.starting and one_less < LOW, now),
        idle_since=_since(memory.idle_since, idle, now),
        waiting=load.waiting,
        looked=now,
    )


def _since(before: float | None, true: bool, now: float) -> float | None:
    if not true:
        return None
    return now if before is None else before


def _more(bounds: Bounds, wanted: int, load: Load, pressure: float) -> int:
    coming = load.ready + load.starting
    if wanted > coming or pressure * load.ready <= HIGH * coming:
        return wanted  # those that were decided are not even starting, or will suffice
    most = max(wanted + 1, math.floor(wanted * GROWTH))
    return bounds.clamp(min(most, max(wanted, math.ceil(pressure * load.ready))))


def _fewer(bounds: Bounds, wanted: int, load: Load, memory: Memory, now: float) -> int:
    patience = max(DOWN_AFTER_S, 3 * load.start_s)
    if wanted > max(1, bounds.min) and memory.low_since is not None and now - memory.low_since >= patience:
        return wanted - 1
    last = wanted == 1 and bounds.min == 0 and not load.starting
    if last and memory.idle_since is not None and now - memory.idle_since >= max(ZERO_AFTER_S, patience):
        return 0
    return wanted
