"""Random fleets and wishes for the placement benchmark, and what a set of plans costs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from npufleet.cluster.endpoints import Role
from npufleet.cluster.placement import cost
from npufleet.cluster.placement.plan import Placed, Request
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.model import Topology

UNPLACED = 10  # cost of each NPU of an engine that is not placed: more than any place of it costs


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fleet, what others use of it (masks by node id), and the engines to place."""

    name: str
    topology: Topology
    busy: dict[str, int]
    wishes: list[Request]

    @property
    def free(self) -> dict[str, int]:
        return {node.node_id: node.usable & ~self.busy.get(node.node_id, 0) for node in self.topology.nodes}


def total(case: Case, engines: Iterable[Placed]) -> int:
    """Return the cost of the fleet with these engines, and of those wishes that are not among them."""
    placed = list(engines)
    names = {engine.engine_id for engine in placed}
    missing = sum(wish.npus for wish in case.wishes if wish.engine_id not in names)
    return cost.of(case.topology, placed, case.busy) + UNPLACED * missing


def small(seed: int, kinds: tuple[str, ...]) -> Case:
    """A fleet of three to six servers of these kinds, worn, with engines for most of what is free."""
    draw = random.Random(f"{seed} {kinds}")
    nodes = []
    for i in range(draw.randint(3, 6)):
        kind = draw.choice(kinds)
        told: dict[str, object] = {"failure_domain": draw.choice([None, "r0", "r1"])}
        if kind == "a3":
            told["super_pod"] = draw.choice("01")
        nodes.append(simulated.server(kind, f"n{i}", **told))
    busy = {}
    for node in nodes:
        if draw.random() < 0.4:
            busy[node.node_id] = sum(1 << i for i in range(node.npus) if draw.random() < 0.3)
    topology = Topology(nodes=tuple(nodes))
    return Case(
        name=" ".join(kinds),
        topology=topology,
        busy=busy,
        wishes=wishes(draw, int(topology.npus * draw.uniform(0.4, 0.9))),
    )


def large(npus: int, count: int) -> Case:
    """A fleet of so many NPUs, half of them A2 and half A3, and ``count`` engines for three quarters of it."""
    draw = random.Random(npus)
    topology = simulated.fleet({"a2": npus // 16, "a3": npus // 32})
    left, made = npus * 3 // 4, []
    for i in range(count):
        share = max(1, left // (count - i))
        size = draw.choice([size for size in (1, 2, 4, 8) if size <= max(1, share)])
        replicas = max(1, round(share / size * draw.uniform(0.5, 1.5)))
        replicas += replicas % 2 if replicas > 1 else 0
        wish = Request(
            engine_id=f"e{i}",
            model=f"m{draw.randrange(20)}",
            tensor_parallel_size=size,
            data_parallel_size=replicas,
            expert_parallel=replicas > 1,
            role=draw.choice([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]),
        )
        made.append(wish)
        left -= wish.npus
    return Case(name=f"{npus}", topology=topology, busy={}, wishes=made)


def mixed(seed: int) -> Case:
    """Three A2 and three A3 servers in two super-pods and racks, idle, with engines for most of them."""
    draw = random.Random(seed)
    topology = simulated.fleet({"a2": 3, "a3": 3}, pod_servers=2, rack_servers=2)
    asked = wishes(draw, int(topology.npus * draw.uniform(0.6, 0.9)))
    return Case(name="3 A2 + 3 A3", topology=topology, busy={}, wishes=asked)


def wishes(
    draw: random.Random, npus: int, *, at_most: int = 10, sizes: tuple[int, ...] = (1, 1, 2, 2, 4, 4, 8)
) -> list[Request]:
    """Engines for up to so many NPUs: several models, replicas, pipelines, experts, prefill beside decode."""
    made: list[Request] = []
    while npus > 0 and len(made) < at_most:
        size = draw.choice(sizes)
        stages, replicas = draw.choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (1, 4)])
        if size * stages * replicas > npus:
            npus -= 1
            continue
        wish = Request(
            engine_id=f"e{len(made)}",
            model=draw.choice("abc"),
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            data_parallel_size=replicas,
            expert_parallel=replicas > 1,
            role=draw.choice([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]),
        )
        made.append(wish)
        npus -= wish.npus
    return made
