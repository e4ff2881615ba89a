"""Whether an engine makes progress: tokens come, or its core answers through all of its workers.

An open port proves nothing: a core that waits for a stopped worker keeps every connection open. So an engine
that has sent no token lately is asked for a sign of life that the core passes to each worker between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

BEAT_S = 2.0
"""The least time between two looks."""

BEATS = 4
"""How often an engine without tokens is asked within the time that it may stall. Rarely, because a worker that was
asked spins for a second afterwards, ready for the next step (vLLM's shared-memory queue)."""


class Stalled(RuntimeError):
    """The engine makes no progress; the text says since when."""


async def watch(llm: Any, last_token: Callable[[], float], stall_s: float) -> None:
    """Return never; raise :class:`Stalled` when the engine behind ``llm`` makes no progress.

    Args:
        llm: vLLM's AsyncLLM.
        last_token: when the last token of any request came, seconds on the monotonic clock.
        stall_s: how long a step may take.
    """
    alive, pause = time.monotonic(), max(BEAT_S, stall_s / BEATS)
    while True:
        await asyncio.sleep(pause)
        alive = max(alive, last_token())
        if time.monotonic() - alive < pause:
            continue
        asked, fair = asyncio.ensure_future(beat(llm)), time.monotonic() + pause
        while not asked.done():
            began = time.monotonic()
            look = max(0.0, min(max(alive + stall_s, fair) - began, BEAT_S))
            await asyncio.wait([asked], timeout=look)
            if (
                time.monotonic() - began > look + pause / 2
            ):  # this process itself was halted: its news comes now
                fair = time.monotonic() + pause
            alive = max(alive, last_token())  # a token that comes meanwhile counts too
            if not asked.done() and time.monotonic() >= max(alive + stall_s, fair):
                asked.cancel()
                raise Stalled(f"neither a token nor a finished step of its workers for {stall_s:.0f} s")
        await asked
        alive = time.monotonic()


async def beat(llm: Any) -> None:
    """Return when the engine core has heard from each of its workers. Raises what vLLM raises for a dead core."""
    await llm.collective_rpc("check_health")
