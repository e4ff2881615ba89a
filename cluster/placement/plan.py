"""Where an engine's workers sit: a pure function from the state of the fleet and a request to bundles.

First version: the tensor-parallel group of an engine stays inside one node, because its collectives run every
layer and only the links inside a node carry them fast enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the fleet and the NPUs it has."""

    node_id: str
    npus: int
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return how messages name the node."""
        return self.address or self.node_id[:12]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The nodes of the fleet."""

    nodes: tuple[Node, ...]

    @property
    def npus(self) -> int:
        """Return the NPUs of all nodes together."""
        return sum(node.npus for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one engine needs."""

    engine_id: str
    model: str
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One NPU for one worker: the place of ``rank`` is on ``node_id``."""

    rank: int
    node_id: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bundles of one engine in the order of their ranks."""

    engine_id: str
    bundles: tuple[Bundle, ...]

    def npus_on(self, node_id: str) -> int:
        """Return how many NPUs of ``node_id`` the plan takes."""
        return sum(bundle.node_id == node_id for bundle in self.bundles)


class NoRoom(ValueError):
    """The request cannot be placed.

    ``never`` is true when no node could hold it even if the whole fleet were idle, so that waiting is
    useless.
    """

    def __init__(self, message: str, *, never: bool) -> None:
        super().__init__(message)
        self.never = never


def plan(topology: Topology, free: Mapping[str, int], request: Request) -> Plan:
    """Place one engine.

    Among the nodes with room the one with the least free NPUs is taken, so that large holes stay for large
    engines; equal ones are taken by their id, so that the same state gives the same plan.

    Args:
        topology: the nodes of the fleet.
        free: free NPUs by node id; a node that is absent has none.
        request: what the engine needs.

    Raises:
        NoRoom: if no node has room now, or none could ever have it; the message says what is missing.
    """
    need = request.tensor_parallel_size
    assert need >= 1, need
    fitting = [node for node in topology.nodes if free.get(node.node_id, 0) >= need]
    if not fitting:
        raise _no_room(topology, free, request)
    chosen = min(fitting, key=lambda node: (free[node.node_id], node.node_id))
    bundles = tuple(Bundle(rank=rank, node_id=chosen.node_id) for rank in range(need))
    return Plan(engine_id=request.engine_id, bundles=bundles)


def _no_room(topology: Topology, free: Mapping[str, int], request: Request) -> NoRoom:
    need = request.tensor_parallel_size
    wish = f"an engine of {request.model!r} needs {need} NPU{'s' if need > 1 else ''} on one node"
    if not any(node.npus for node in topology.nodes):
        return NoRoom(
            f"{wish}, but no node of the Ray cluster offers the resource NPU; "
            "start its nodes with --resources '{\"NPU\": COUNT}'",
            never=True,
        )
    largest = max(node.npus for node in topology.nodes)
    if largest < need:
        return NoRoom(f"{wish}, but the largest node has {largest}; lower tensor_parallel_size", never=True)
    shown = [
        f"{node.title} {free.get(node.node_id, 0)} of {node.npus}" for node in topology.nodes if node.npus
    ]
    more = f" and {len(shown) - 8} more nodes" if len(shown) > 8 else ""
    return NoRoom(f"{wish}, but free are: {', '.join(shown[:8])}{more}", never=False)
