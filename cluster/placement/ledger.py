"""Reservations: NPUs promised to an engine and not yet visible in Ray as its placement group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from . import planner
from .plan import NoRoom, Placed, Plan, Request, placed_as, weight
from .ray_state import State

PROMISE_S = 120.0
"""How long a promise holds NPUs for an engine that never made its placement group."""

Describe = Callable[[str], Placed | None]
"""Tells model, role and priority of an engine by its id; None for what is no engine of this fleet."""


@dataclass(kw_only=True)
class Ledger:
    """Plans engines so that two of them never get the same NPU."""

    promises: dict[str, tuple[Placed, float]] = field(default_factory=dict)  # by engine id: when it lapses

    def reserve(
        self,
        state: State,
        request: Request,
        now: float,
        *,
        others: Iterable[Request] = (),
        describe: Describe = lambda engine_id: None,
        preempt: bool = False,
    ) -> Plan:
        """Plan ``request`` on what is neither held in Ray nor promised, and promise it until it is placed.

        Args:
            state: what Ray says.
            request: what the engine needs.
            now: seconds on a monotonic clock.
            others: engines that are wanted and not there yet; those that are placed first keep their room.
            describe: what is known of engines that sit already.
            preempt: whether engines of lower priority may be ended for this one.

        Raises:
            NoRoom: see :func:`npufleet.cluster.placement.planner.plan`.
        """
        engines = self.engines(state, request.engine_id, now, describe)
        free = state.free()
        for placed, _ in self.promises.values():
            for bundle in placed.bundles:
                if bundle.node_id in free and bundle.npu is not None:
                    free[bundle.node_id] &= ~(1 << bundle.npu)
        first = [other for other in others if weight(other) > weight(request)]
        made = planner.plan_all(state.topology, free, [*first, request], engines)[request.engine_id]
        if isinstance(made, NoRoom) and preempt:
            made = planner.plan(state.topology, free, request, engines, preempt=True)
        if isinstance(made, NoRoom):
            raise made if not first else self._kept(made, state, free, request, engines, first)
        self.promises[request.engine_id] = placed_as(request, made.bundles), now + PROMISE_S
        return made

    def engines(self, state: State, asking: str, now: float, describe: Describe) -> tuple[Placed, ...]:
        """Return the engines that sit or were promised NPUs, without the one that asks; forget stale promises."""
        self.promises = {
            engine: (placed, until)
            for engine, (placed, until) in self.promises.items()
            if until > now and engine not in state.created and engine != asking
        }
        sitting = [
            replace(told, bundles=bundles)
            for name, bundles in state.groups.items()
            if name not in self.promises and (told := describe(name)) is not None
        ]
        return (*sitting, *(placed for placed, _ in self.promises.values()))

    @staticmethod
    def _kept(
        refused: NoRoom,
        state: State,
        free: dict[str, int],
        request: Request,
        engines: tuple[Placed, ...],
        first: list[Request],
    ) -> NoRoom:
        """The refusal, saying so if there is room that is kept for engines that come first."""
        try:
            planner.plan(state.topology, free, request, engines)
        except NoRoom as error:
            return error
        models = ", ".join(dict.fromkeys(repr(other.model) for other in first))
        return NoRoom(
            f"{refused}; the room that is left is kept for engines of {models}, which come first",
            never=refused.never,
            rule=refused.rule,
        )

    def release(self, engine_id: str) -> None:
        """Forget the promise of an engine that gave up."""
        self.promises.pop(engine_id, None)
