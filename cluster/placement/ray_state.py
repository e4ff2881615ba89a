"""Ray's own truth about nodes and reserved NPUs, as the planner wants it.

Only public Ray calls: ``ray.nodes()`` for what nodes have, ``placement_group_table()`` for what is reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .plan import Node, Topology

RESOURCE = "NPU"  # the name that Ray's own accelerator support gives Ascend NPUs
TYPE_LABEL = "ray.io/accelerator-type"  # the node label that names the chip


def topology(nodes: Iterable[Mapping[str, Any]]) -> Topology:
    """Return the topology of the live nodes in the answer of ``ray.nodes()``, in the order of their ids."""
    alive = [
        Node(
            node_id=node["NodeID"],
            npus=int(node.get("Resources", {}).get(RESOURCE, 0)),
            address=node.get("NodeManagerAddress", ""),
            labels=dict(node.get("Labels") or {}),
        )
        for node in nodes
        if node.get("Alive")
    ]
    return Topology(nodes=tuple(sorted(alive, key=lambda node: node.node_id)))


def reserved(groups: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Return the NPUs that placement groups hold, by node id, from ``placement_group_table()``.

    A bundle that is not placed yet has no node and is not counted: the controller's own reservations cover
    it.
    """
    held: Counter[str] = Counter()
    for group in groups.values():
        if group.get("state") == "REMOVED":
            continue
        nodes = group.get("bundles_to_node_id") or {}
        for index, bundle in (group.get("bundles") or {}).items():
            node_id = nodes.get(index)
            if node_id:
                held[node_id] += int(bundle.get(RESOURCE, 0))
    return held


def read() -> tuple[Topology, Counter[str], frozenset[str]]:
    """Ask Ray for its nodes, the NPUs reserved on each, and the names of the groups that are placed.

    Blocks for a call to the Ray head; run it in a thread.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table()
    placed = frozenset(group["name"] for group in groups.values() if group.get("state") == "CREATED")
    return topology(ray.nodes()), reserved(groups), placed
