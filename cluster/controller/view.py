"""What Ray says, read for many askers at once, and what stands for it while its head is away.

A read blocks in the head's service, without end while there is none. So at most one is under way, everybody waits for
that one, and who cannot wait gets what the last one told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..placement import ray_state
from ..placement.ray_state import State
from ..topology.model import Topology

PATIENCE_S = 5.0
"""A head that has not answered for so long counts as away. Large clusters tell everything in well under a second."""

EMPTY = State(topology=Topology(nodes=()), groups={}, created=frozenset())


class HeadAway(RuntimeError):
    """Ray's head does not answer."""


@dataclass(kw_only=True)
class RayView:
    """The state of the Ray cluster. ``read`` is replaced in tests."""

    read: Callable[[], State] = ray_state.read
    patience: float = PATIENCE_S
    last: State = EMPTY
    heard: float = field(
        default_factory=time.monotonic
    )  # when ``last`` was told, seconds on the monotonic clock
    _reading: asyncio.Future[State] | None = None

    async def now(self) -> State:
        """Return what Ray says now. Raises :class:`HeadAway` if it says nothing for ``patience`` seconds."""
        # One that began before this call may have seen the cluster before the caller changed it.
        if self._reading is not None and not self._reading.done():
            await self._wait(self._reading)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self.read))
        return await self._wait(self._reading)

    async def latest(self) -> tuple[State, float]:
        """Return what Ray says, and how many seconds ago it said so: 0 unless its head is away."""
        try:
            return await self.now(), 0.0
        except HeadAway:
            return self.last, time.monotonic() - self.heard

    async def _wait(self, reading: asyncio.Future[State]) -> State:
        from ray.exceptions import RayError

        try:
            state = await asyncio.wait_for(asyncio.shield(reading), self.patience)
        except TimeoutError as error:
            raise HeadAway(f"Ray's head has not answered for {self.patience:.0f} s") from error
        except (
            RayError,
            ConnectionError,
            RuntimeError,
        ) as error:  # what Ray makes of a head that went away meanwhile
            raise HeadAway(f"Ray's head does not answer: {error}") from error
        self.last, self.heard = state, time.monotonic()
        return state
