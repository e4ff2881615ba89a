"""What a plan costs, in one unit: the aim that the planner follows and that its benchmark is measured by.

Rules are never traded for cost. Among plans that keep them, an engine that crosses nodes pays for slower
collectives, engines of one model in one failure domain for failing together, a prefill and a decode engine in
different super-pods for KV caches over RoCE, and every domain or die pair that is broken into for the large
engine that no longer finds a whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..endpoints import Role
from ..topology.model import Topology, mask_of
from .plan import Placed
from .room import broken

SPAN = 8  # each node of an engine beyond its first
APART = 6  # a prefill or decode engine with no partner in its super-pod
CROWDED = 4  # an engine in a failure domain where one of the same model and role sits already
OPENED = 1  # an HCCS domain in use
HALVED = 1  # a die pair half in use


def of(topology: Topology, engines: Iterable[Placed], busy: Mapping[str, int] | None = None) -> int:
    """Return the cost of a whole fleet.

    Args:
        topology: the nodes.
        engines: all engines, every bundle with its NPU.
        busy: masks of NPUs that others use, by node id.
    """
    nodes = {node.node_id: node for node in topology.nodes}
    free = {node_id: node.usable & ~(busy or {}).get(node_id, 0) for node_id, node in nodes.items()}
    racks: Counter[tuple[str, Role, str]] = Counter()
    pods: dict[tuple[str, Role], set[str]] = {}
    homes: list[tuple[Placed, set[str]]] = []
    total = 0
    for engine in engines:
        used = {bundle.node_id for bundle in engine.bundles}
        total += SPAN * (len(used) - 1)
        for node_id in used:
            free[node_id] &= ~mask_of(
                b.npu for b in engine.bundles if b.node_id == node_id and b.npu is not None
            )
        racks.update((*engine.kin, rack) for rack in {nodes[n].fails_with for n in used})
        fabrics = {nodes[node_id].fabric for node_id in used}
        pods.setdefault(engine.kin, set()).update(fabrics)
        homes.append((engine, fabrics))
    total += CROWDED * sum(count - 1 for count in racks.values())
    for engine, fabrics in homes:
        partners = pods.get((engine.kin[0], engine.role.partner)) if engine.role.partner else None
        total += APART * bool(partners and not partners & fabrics)
    for node_id, node in nodes.items():
        domains, pairs = broken(node.shape, free[node_id] | (node.shape.mask & ~node.usable))
        total += OPENED * domains + HALVED * pairs
    return total
