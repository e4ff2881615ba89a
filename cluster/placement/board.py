"""The state of a fleet while plans are made: what is free, and which engines sit where.

Nodes that are wired alike and have the same NPUs free are of one *class*; what such a node can hold is computed
once for the class, which is what makes large fleets quick to plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..topology.model import Node, Shape, Topology, mask_of
from . import cost
from .plan import Bundle, Placed, Request, Role
from .room import broken, groups, room

Kind = tuple[int, int]
"""The class of a node: a number for its shape, and its free NPUs as a mask."""


class Board:
    """Free NPUs by node, and what the aim needs to know of engines that sit already."""

    def __init__(self, topology: Topology, free: Mapping[str, int], engines: Iterable[Placed] = ()) -> None:
        self.topology = topology
        self.nodes = {node.node_id: node for node in topology.nodes}
        self.racks = {node.node_id: node.fails_with for node in topology.nodes}
        self.fabrics = {node.node_id: node.fabric for node in topology.nodes}
        self.crowd: Counter[tuple[str, Role, str]] = Counter()  # engines by model, role and failure domain
        self.homes: Counter[tuple[str, Role, str]] = Counter()  # by model, role and fabric
        self.by_chip: dict[str, dict[str, list[Node]]] = {}  # nodes by chip and fabric
        shapes: dict[Shape, int] = {}
        self.shapes: list[Shape] = []
        self.kinds: dict[str, Kind] = {}
        for node in sorted(topology.nodes, key=lambda node: node.node_id):
            if not node.npus:
                continue
            number = shapes.setdefault(node.shape, len(shapes))
            if number == len(self.shapes):
                self.shapes.append(node.shape)
            self.kinds[node.node_id] = number, free.get(node.node_id, 0) & node.usable
            self.by_chip.setdefault(node.soc, {}).setdefault(node.fabric, []).append(node)
        for engine in engines:
            self._count(engine, 1)

    def free(self, node_id: str) -> int:
        """The free NPUs of a node, as a mask."""
        return self.kinds[node_id][1] if node_id in self.kinds else 0

    @property
    def free_npus(self) -> int:
        """How many NPUs are free."""
        return sum(mask.bit_count() for _, mask in self.kinds.values())

    def take(self, engine: Placed) -> None:
        """Give an engine the NPUs of its bundles."""
        for node_id, mask in masks(engine.bundles).items():
            number, free = self.kinds[node_id]
            assert free & mask == mask, f"NPUs of {node_id} are given twice: {free:b}, {mask:b}"
            self.kinds[node_id] = number, free & ~mask
        self._count(engine, 1)

    def give_back(self, engine: Placed) -> None:
        """Take an engine's NPUs away from it; nodes that are gone are left out."""
        for node_id, mask in masks(engine.bundles).items():
            if node_id in self.kinds:
                number, free = self.kinds[node_id]
                self.kinds[node_id] = number, (free | mask) & self.nodes[node_id].usable
        self._count(engine, -1)

    def room(self, kind: Kind, size: int, alone: bool) -> int:
        """How many groups of ``size`` a node of this class can hold."""
        return room(self.shapes[kind[0]], kind[1], size, alone)

    def price(self, kind: Kind, size: int, count: int, alone: bool) -> int:
        """What domains and die pairs cost that ``count`` groups break into on a node of this class."""
        shape, free = self.shapes[kind[0]], kind[1]
        before = broken(shape, free)
        after = broken(shape, free & ~sum(groups(shape, free, size, count, alone)))
        return cost.OPENED * (after[0] - before[0]) + cost.HALVED * (after[1] - before[1])

    def crowded(self, request: Request, node_id: str) -> int:
        """What it costs that engines like this one sit in the node's failure domain already."""
        return cost.CROWDED * bool(self.crowd[request.model, request.role, self.racks[node_id]])

    def apart(self, request: Request, fabric: str) -> int:
        """What it costs to have no partner of the other role in this fabric, where there is one elsewhere."""
        partner = request.role.partner
        if partner is None or self.homes[request.model, partner, fabric]:
            return 0
        elsewhere = any(
            count and model == request.model and role is partner
            for (model, role, _), count in self.homes.items()
        )
        return cost.APART * elsewhere

    def _count(self, engine: Placed, step: int) -> None:
        used = {bundle.node_id for bundle in engine.bundles if bundle.node_id in self.nodes}
        for rack in {self.racks[node_id] for node_id in used}:
            self.crowd[engine.model, engine.role, rack] += step
        for fabric in {self.fabrics[node_id] for node_id in used}:
            self.homes[engine.model, engine.role, fabric] += step


def masks(bundles: Iterable[Bundle]) -> dict[str, int]:
    """Return the NPUs of bundles as masks by node; every bundle has its NPU."""
    found: dict[str, list[int]] = {}
    for bundle in bundles:
        assert bundle.npu is not None, bundle
        found.setdefault(bundle.node_id, []).append(bundle.npu)
    return {node_id: mask_of(indices) for node_id, indices in found.items()}
