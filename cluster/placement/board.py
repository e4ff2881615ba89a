"""The state of a fleet while plans are made: what is free, and which engines sit where.

Nodes that are wired alike and have the same NPUs free are of one *class*; what such a node can hold is computed
once for the class, which is what makes large fleets quick to plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ..endpoints import Role
from ..topology.model import Node, Shape, Topology, mask_of
from . import cost
from .plan import Bundle, Placed, Request
from .room import broken, groups, room, widest

Kind = tuple[int, int]
"""The class of a node: a number for its shape and its sick NPUs, and its free NPUs as a mask."""


class Board:
    """Free NPUs by node, and what the aim needs to know of engines that sit already."""

    def __init__(self, topology: Topology, free: Mapping[str, int], engines: Iterable[Placed] = ()) -> None:
        self.topology = topology
        self.spent = 0  # the cost of what was taken, less that of what was given back
        self.nodes = {node.node_id: node for node in topology.nodes}
        self.racks = {node.node_id: node.fails_with for node in topology.nodes}
        self.fabrics = {node.node_id: node.fabric for node in topology.nodes}
        self.crowd: Counter[tuple[str, Role, str]] = Counter()  # engines by model, role and failure domain
        self.homes: dict[tuple[str, Role], Counter[str]] = defaultdict(Counter)  # and by fabric
        self.by_chip: dict[str, dict[str, list[Node]]] = {}  # nodes by chip and fabric
        shapes: dict[tuple[Shape, int], int] = {}
        self.shapes: list[tuple[Shape, int]] = []  # with the NPUs that are sick, as a mask
        self.kinds: dict[str, Kind] = {}
        for node in topology.nodes:
            if not node.npus:
                continue
            kind = node.shape, node.shape.mask & ~node.usable
            number = shapes.setdefault(kind, len(shapes))
            if number == len(self.shapes):
                self.shapes.append(kind)
            self.kinds[node.node_id] = number, free.get(node.node_id, 0) & node.usable
            self.by_chip.setdefault(node.soc, {}).setdefault(node.fabric, []).append(node)
        self.widest = {
            soc: max(widest(shape) for shape in {node.shape for nodes in fabrics.values() for node in nodes})
            for soc, fabrics in self.by_chip.items()
        }  # the largest tensor-parallel group that one node holds, by chip
        for engine in engines:
            self._count(engine, 1)

    def free(self, node_id: str) -> int:
        """The free NPUs of a node, as a mask."""
        return self.kinds[node_id][1] if node_id in self.kinds else 0

    def take(self, engine: Placed) -> None:
        """Give an engine the NPUs of its bundles."""
        used = masks(engine.bundles)
        for node_id, mask in used.items():
            free = self.kinds[node_id][1]
            assert free & mask == mask, f"NPUs of {node_id} are given twice: {free:b}, {mask:b}"
            self._wear(node_id, free & ~mask)
        self.spent += cost.SPAN * (len(used) - 1)
        self._count(engine, 1)

    def give_back(self, engine: Placed) -> None:
        """Take an engine's NPUs away from it; nodes that are gone are left out."""
        used = masks(engine.bundles)
        for node_id, mask in used.items():
            if node_id in self.kinds:
                self._wear(node_id, (self.kinds[node_id][1] | mask) & self.nodes[node_id].usable)
        self.spent -= cost.SPAN * (len(used) - 1)
        self._count(engine, -1)

    def close(self, node_id: str) -> Kind:
        """Leave a node out of what is free until :meth:`reopen` gets what this returns."""
        kind = self.kinds[node_id]
        self.kinds[node_id] = kind[0], 0
        return kind

    def reopen(self, node_id: str, kind: Kind) -> None:
        """Undo :meth:`close`."""
        self.kinds[node_id] = kind

    def _wear(self, node_id: str, free: int) -> None:
        number, before = self.kinds[node_id]
        self.spent += self._worn(number, free) - self._worn(number, before)
        self.kinds[node_id] = number, free

    def room(self, kind: Kind, size: int, alone: bool) -> int:
        """How many groups of ``size`` a node of this class can hold."""
        return room(self.shapes[kind[0]][0], kind[1], size, alone)

    def price(self, kind: Kind, size: int, count: int, alone: bool) -> int:
        """What domains and die pairs cost that ``count`` groups break into on a node of this class."""
        number, free = kind
        taken = sum(groups(self.shapes[number][0], free, size, count, alone))
        return self._worn(number, free & ~taken) - self._worn(number, free)

    def _worn(self, number: int, free: int) -> int:
        """The price of domains and die pairs in use; sick NPUs are not in use."""
        shape, sick = self.shapes[number]
        domains, pairs = broken(shape, free | sick)
        return cost.OPENED * domains + cost.HALVED * pairs

    def crowded(self, request: Request, node_id: str) -> int:
        """What it costs that engines like this one sit in the node's failure domain already."""
        return cost.CROWDED * bool(self.crowd[*request.kin, self.racks[node_id]])

    def apart(self, request: Request, fabric: str) -> int:
        """What it adds to the cost of engines without a partner near them to place this one in this fabric."""
        partner = request.role.partner
        if partner is None:
            return 0
        mine, theirs = self.homes[request.kin], self.homes[request.kin[0], partner]
        return _apart(mine + Counter({fabric: 1}), theirs) - _apart(mine, theirs)

    def _count(self, engine: Placed, step: int) -> None:
        used = {bundle.node_id for bundle in engine.bundles if bundle.node_id in self.nodes}
        for rack in {self.racks[node_id] for node_id in used}:
            before = self.crowd[*engine.kin, rack]
            self.crowd[*engine.kin, rack] += step
            self.spent += cost.CROWDED * (max(0, before + step - 1) - max(0, before - 1))
        mine, partner = self.homes[engine.kin], engine.role.partner
        theirs = self.homes[engine.kin[0], partner] if partner else Counter()
        self.spent -= _apart(mine, theirs)
        for fabric in {self.fabrics[node_id] for node_id in used}:
            mine[fabric] += step
        self.spent += _apart(mine, theirs)


def _apart(mine: Counter[str], theirs: Counter[str]) -> int:
    """What engines of two roles cost that have none of the other role in their fabric, by engines in each."""
    mine, theirs = +mine, +theirs
    if not mine or not theirs:
        return 0
    lonely = sum(count for fabric, count in mine.items() if fabric not in theirs)
    return cost.APART * (lonely + sum(count for fabric, count in theirs.items() if fabric not in mine))


def masks(bundles: Iterable[Bundle]) -> dict[str, int]:
    """Return the NPUs of bundles as masks by node; every bundle has its NPU."""
    found: dict[str, list[int]] = {}
    for bundle in bundles:
        assert bundle.npu is not None, bundle
        found.setdefault(bundle.node_id, []).append(bundle.npu)
    return {node_id: mask_of(indices) for node_id, indices in found.items()}
