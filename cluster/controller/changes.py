"""Changes of a running fleet: planned, applied, followed to their end, taken back if they fail.

The wish lives in Serve (see :mod:`npufleet.cluster.deploy.wish`). A change submits the application with the new
wish, which carries the old one until the change is over, so that a controller that restarts in the middle
goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ..deploy.plan import Kind, Step, render, steps
from ..deploy.wish import Wish, generation
from .outcome import Look, Outcome, outcome

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0


class ChangeState(StrEnum):
    """How far a change is."""

    APPLYING = "applying"
    DONE = "done"
    ROLLING_BACK = "rolling back"
    ROLLED_BACK = "rolled back"


@dataclass(kw_only=True)
class Change:
    """One change, as `npufleet status` shows it."""

    state: ChangeState
    steps: list[dict[str, Any]]
    began: float
    detail: str = ""  # what it waits for, or why it was taken back
    seconds: float | None = None  # that it took

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "state": str(self.state),
            "steps": self.steps,
            "detail": self.detail,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
        }


@dataclass(kw_only=True)
class Changes:
    """Applies one change at a time.

    ``submit(wish, surge)`` gives the application to Serve; ``room(wish)`` tells how many engines of each model
    would find NPUs now; ``look(began)`` tells what there is, of starts only those that were heard of since. All
    are the controller's.
    """

    wish: Wish
    submit: Callable[[Wish, Mapping[str, int]], Awaitable[None]]
    room: Callable[[Wish], Awaitable[Mapping[str, int]]]
    look: Callable[[float], Awaitable[Look]]
    change: Change | None = None
    _task: asyncio.Task[None] | None = None
    _submitting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def busy(self) -> bool:
        """True while a change is under way."""
        return self._task is not None and not self._task.done()

    async def propose(self, wish: Wish) -> tuple[Step, ...]:
        """Return the steps to ``wish``. Raises ``ValueError`` for what no running fleet can change."""
        return steps(self.wish, wish, await self.room(wish))

    async def apply(self, wish: Wish) -> tuple[Step, ...]:
        """Begin to change the fleet to ``wish`` and return the steps.

        A change that is still under way is overtaken: if this one fails, the fleet goes back to what it was
        before both.

        Raises:
            ValueError: if no running fleet can change so.
        """
        planned = await self.propose(wish)
        if not planned:
            return planned
        async with self._submitting:  # so that the other is not stopped within a submission
            before = self.wish.previous or self.wish
            await self.stop()
        self._begin(replace(wish, previous=replace(before, previous=None)), planned)
        return planned

    def _begin(self, wish: Wish, planned: tuple[Step, ...]) -> None:
        told = [step.to_dict() for step in planned]
        self.change = Change(state=ChangeState.APPLYING, steps=told, began=time.monotonic())
        logger.info("change:\n%s", render(planned))
        surge = {step.what: step.surge for step in planned if step.kind is Kind.ROLL}
        self._task = asyncio.create_task(self._run(wish, surge), name="change")

    async def scale(self, model: str, engines: int) -> None:
        """Set the number of engines of one model at once; running requests end first."""
        await self.adjust(lambda wish: wish.scaled(model, engines))

    async def adjust(self, change: Callable[[Wish], Wish]) -> None:
        """Change the wish at once, in a way that needs no following."""
        async with self._submitting:
            before, wish = self.wish, change(self.wish)
            if wish == before:
                return
            self.wish, submitted = wish, False
            try:
                await self.submit(wish, {})
                submitted = True
            finally:
                if (
                    not submitted
                ):  # Serve does not know of it, so the next look must see that it is still to be done
                    self.wish = before

    def taken_over(self, wish: Wish) -> None:
        """Serve tells the wish: that of this controller, or of one before it whose change is not over."""
        if self.busy:
            return
        self.wish = wish
        if wish.previous is not None and self.change is None:
            logger.info("going on with the change that the controller before began")
            self.change = Change(state=ChangeState.APPLYING, steps=[], began=time.monotonic())
            self._task = asyncio.create_task(self._follow(wish), name="change")

    async def stop(self) -> None:
        """Stop following; what was submitted goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, wish: Wish, surge: Mapping[str, int]) -> None:
        async with self._submitting:
            self.wish = wish
            await self.submit(wish, surge)
        await self._follow(wish)

    async def _follow(self, wish: Wish) -> None:
        assert self.change is not None and wish.previous is not None
        found = await self._end_of(wish)
        if not found.failed:
            await self._over(replace(self.wish, previous=None), ChangeState.DONE, "")
            return
        logger.error("the change failed, going back: %s", found.detail)
        self.change.state, self.change.detail = ChangeState.ROLLING_BACK, found.detail
        previous = wish.previous
        async with self._submitting:
            self.wish = replace(previous, previous=None)
            await self.submit(self.wish, {})
        await self._end_of(self.wish)
        await self._over(self.wish, ChangeState.ROLLED_BACK, found.detail)

    async def _end_of(self, wish: Wish) -> Outcome:
        """Wait until the fleet is as ``wish`` says, or cannot become so."""
        wanted = {
            model.name: (generation(wish.config, model), wish.engines[model.name])
            for model in wish.config.models
        }
        assert self.change is not None
        while True:
            found = outcome(wanted, await self.look(self.change.began))
            if found.over:
                return found
            if self.change.state is ChangeState.APPLYING:
                self.change.detail = found.detail
            await asyncio.sleep(FOLLOW_S)

    async def _over(self, wish: Wish, state: ChangeState, detail: str) -> None:
        assert self.change is not None
        async with self._submitting:
            self.wish = wish
            await self.submit(wish, {})
        self.change.state, self.change.detail = state, detail
        self.change.seconds = time.monotonic() - self.change.began
        logger.info("the change is %s after %.1f s", state, self.change.seconds)
