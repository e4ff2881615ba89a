"""Ray's own truth about nodes and reserved NPUs, as the planner wants it.

Public Ray calls: ``ray.nodes()`` for what nodes have, ``placement_group_table()`` for what is reserved. Which nodes
are to be taken away (``ray drain-node``, the autoscaler) Ray tells nobody publicly; Ray Serve reads it as we do.
Bundles of our own groups name their NPU through its resource, so a controller that has just started knows which
NPUs are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..topology.labels import RESOURCE, from_ray, npu_resource
from ..topology.model import Node, Topology, indices_of
from .plan import Bundle


@dataclass(frozen=True, kw_only=True)
class State:
    """What Ray says at one moment."""

    topology: Topology
    groups: Mapping[str, tuple[Bundle, ...]]
    """Bundles that are placed, by the name of their placement group; an engine names its group after itself."""
    created: frozenset[str]
    """The groups that are placed as a whole."""
    draining: frozenset[str] = frozenset()
    """Ids of the nodes that Ray is about to take away."""

    def free(self) -> dict[str, int]:
        """Return the masks of NPUs that no group holds, by node id."""
        free = {node.node_id: node.usable for node in self.topology.nodes}
        for bundles in self.groups.values():
            for bundle in bundles:
                if bundle.node_id in free:
                    assert bundle.npu is not None, bundle
                    free[bundle.node_id] &= ~(1 << bundle.npu)
        return free

    def held(self, node_id: str) -> int:
        """Return how many NPUs of a node groups hold."""
        return sum(bundle.node_id == node_id for bundles in self.groups.values() for bundle in bundles)


def topology(nodes: Iterable[Mapping[str, Any]]) -> Topology:
    """Return the topology of the live nodes in the answer of ``ray.nodes()``, in the order of their ids.

    Raises:
        ValueError: if a label of ours does not parse.
    """
    alive = [from_ray(node) for node in nodes if node.get("Alive")]
    return Topology(nodes=tuple(sorted(alive, key=lambda node: node.node_id)))


def state(
    nodes: Iterable[Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
    draining: Iterable[str] = (),
) -> State:
    """Return the state from the answers of ``ray.nodes()`` and ``placement_group_table()``, and the ids of nodes that
    drain.

    A bundle that is not placed yet has no node and is left out: the controller's own promises cover it. Bundles
    that do not name their NPU, because others made them or the node was started without its labels, count as the
    lowest free ones: these are what Ray gives out.
    """
    fleet = topology(nodes)
    live = {key: group for key, group in groups.items() if group.get("state") != "REMOVED"}
    placed = {key: list(_placed(group)) for key, group in live.items()}
    open_ = {node.node_id: node.shape.mask for node in fleet.nodes}
    for bundles in placed.values():
        for node_id, npu, _ in bundles:
            if npu is not None and node_id in open_:
                open_[node_id] &= ~(1 << npu)
    named: dict[str, tuple[Bundle, ...]] = {}
    for key, bundles in placed.items():
        made: list[Bundle] = []
        for node_id, npu, count in bundles:
            indices = (npu,) if npu is not None else _lowest(open_, node_id, count)
            made += [Bundle(rank=len(made) + i, node_id=node_id, npu=n) for i, n in enumerate(indices)]
        if made:
            name = str(live[key].get("name") or key)
            named[name if name not in named else key] = tuple(made)
    created = frozenset(
        str(group["name"])
        for group in groups.values()
        if group.get("state") == "CREATED" and group.get("name")
    )
    return State(topology=fleet, groups=named, created=created, draining=frozenset(draining))


def _placed(group: Mapping[str, Any]) -> Iterable[tuple[str, int | None, int]]:
    """The bundles of a group that sit on a node: (node, the NPU if it is named, how many NPUs)."""
    nodes = group.get("bundles_to_node_id") or {}
    prefix = npu_resource(0)[:-1]
    for index, bundle in sorted((group.get("bundles") or {}).items()):
        node_id, count = nodes.get(index), int(bundle.get(RESOURCE, 0))
        if node_id and count:
            names = [name.removeprefix(prefix) for name in bundle if name.startswith(prefix)]
            yield node_id, int(names[0]) if count == 1 and names and names[0].isdigit() else None, count


def _lowest(open_: dict[str, int], node_id: str, count: int) -> tuple[int, ...]:
    found = indices_of(open_.get(node_id, 0))[:count]
    for index in found:
        open_[node_id] &= ~(1 << index)
    return found


def read() -> State:
    """Ask Ray for its nodes and the NPUs that placement groups hold.

    Blocks for a call to the Ray head; run it in a thread.
    """
    import ray
    from ray._private.state import state as accessor
    from ray.util.placement_group import placement_group_table

    return state(ray.nodes(), placement_group_table(), accessor.get_draining_nodes())


def exact(topology: Topology) -> dict[str, Node]:
    """Return the nodes whose NPUs Ray knows by their indices, by node id."""
    return {node.node_id: node for node in topology.nodes if node.exact}
