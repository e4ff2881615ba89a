"""Reservations: NPUs promised to an engine and not yet visible in Ray as its placement group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import Plan, Request, Topology, plan

PROMISE_S = 120.0
"""How long a promise holds NPUs for an engine that never made its placement group."""


@dataclass(kw_only=True)
class Ledger:
    """Plans engines one after the other so that two of them never get the same NPU."""

    promises: dict[str, tuple[Plan, float]] = field(
        default_factory=dict
    )  # by engine id: plan, when it lapses

    def reserve(
        self,
        topology: Topology,
        held: Mapping[str, int],
        placed: frozenset[str],
        request: Request,
        now: float,
    ) -> Plan:
        """Plan ``request`` on what is neither held in Ray nor promised, and promise it until it is placed.

        Args:
            topology: the nodes of the fleet.
            held: NPUs by node id that placement groups hold.
            placed: names of the placement groups that hold them; an engine names its group after itself.
            request: what the engine needs.
            now: seconds on a monotonic clock.

        Raises:
            NoRoom: see :func:`npufleet.cluster.placement.plan.plan`.
        """
        self.promises = {
            engine: (promised, until)
            for engine, (promised, until) in self.promises.items()
            if until > now and engine not in placed and engine != request.engine_id
        }
        taken = Counter(held)
        for promised, _ in self.promises.values():
            taken.update(bundle.node_id for bundle in promised.bundles)
        free = {node.node_id: max(0, node.npus - taken[node.node_id]) for node in topology.nodes}
        made = plan(topology, free, request)
        self.promises[request.engine_id] = (made, now + PROMISE_S)
        return made

    def release(self, engine_id: str) -> None:
        """Forget the promise of an engine that gave up."""
        self.promises.pop(engine_id, None)
