"""Topologies of any size without hardware: for tests, benchmarks and planning of fleets that are not there yet."""

from __future__ import annotations

from . import facts
from .facts import Facts
from .model import Node, Topology

SERVERS = {
    "a2": ("Ascend910B3", 8),
    "a2-16": ("Ascend910B3", 16),
    "a3": ("Ascend910_9391", 16),
    "310p": ("Ascend310P3", 8),
}
"""Kinds of servers: chip and NPUs."""


def server(kind: str, node_id: str, **told: object) -> Node:
    """Return one server; ``told`` are fields of :class:`Facts`.

    Raises:
        ValueError: if the kind is not known.
    """
    if kind not in SERVERS:
        raise ValueError(f"no server {kind!r}; known are {', '.join(SERVERS)}")
    soc, count = SERVERS[kind]
    here = {"soc": soc, "indices": tuple(range(count)), **told}
    return facts.node(node_id, Facts(**here), exact=True)  # type: ignore[arg-type]


def fleet(
    servers: dict[str, int], *, pod_servers: int = 48, rack_servers: int = 4, offset: int = 0
) -> Topology:
    """Return a fleet of so many servers of each kind, in racks of one kind and, on A3, in super-pods.

    Args:
        servers: number of servers by kind.
        pod_servers: servers of a super-pod.
        rack_servers: servers of a rack, which is their failure domain.
        offset: number of the first server.
    """
    nodes = []
    for kind, count in servers.items():
        for i in range(offset, offset + count):
            told: dict[str, object] = {"failure_domain": f"{kind}-rack-{i // rack_servers}"}
            if kind == "a3":
                told["super_pod"] = str(i // pod_servers)
            nodes.append(server(kind, f"{kind}-{i:05d}", **told))
    return Topology(nodes=tuple(nodes))
