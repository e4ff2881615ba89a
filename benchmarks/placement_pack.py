"""What Ray's own PACK strategy makes of the same wishes: real placement groups on a real Ray of several nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.placement_cases import Case
from npufleet.cluster.placement.plan import Bundle, Placed, Request, placed_as, weight
from npufleet.cluster.placement.room import illegal
from npufleet.cluster.topology.model import Topology, mask_of

FREE_S = 60.0
WAIT_S = 5.0  # PACK either places at once or leaves the group pending


@contextmanager
def cluster(topology: Topology) -> Iterator[dict[str, str]]:
    """A Ray with one raylet for each node of the topology; yields our node id by Ray's."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for node in topology.nodes:
            made.add_node(num_cpus=1, resources={"NPU": node.npus}, labels={"bench-node": node.node_id})
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        made.wait_for_nodes()
        yield {
            entry["NodeID"]: entry["Labels"]["bench-node"]
            for entry in ray.nodes()
            if "bench-node" in entry["Labels"]
        }
    finally:
        ray.shutdown()
        made.shutdown()


def place(case: Case, names: dict[str, str], *, largest_first: bool) -> list[Placed]:
    """Place the wishes one after the other with PACK; those that stay pending are left out."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    free = {node_id: mask.bit_count() for node_id, mask in case.free.items()}
    left = dict(case.free)
    found: list[Placed] = []
    groups: list[Any] = []
    for wish in sorted(case.wishes, key=weight, reverse=True) if largest_first else case.wishes:
        if wish.npus > sum(free.values()):
            continue
        group = placement_group([{"NPU": 1}] * wish.npus, strategy="PACK")
        groups.append(group)
        if not group.wait(WAIT_S):
            remove_placement_group(groups.pop())
            continue
        homes = placement_group_table(group)["bundles_to_node_id"]
        bundles = []
        for rank, ray_id in enumerate(sorted(homes.values())):  # ranks by node, as vLLM gives them out
            node_id = names[ray_id]
            lowest = left[node_id] & -left[node_id]  # the NPU that Ray gives out
            left[node_id] ^= lowest
            free[node_id] -= 1
            bundles.append(Bundle(rank=rank, node_id=node_id, npu=lowest.bit_length() - 1))
        found.append(placed_as(wish, tuple(bundles)))
    for group in groups:
        remove_placement_group(group)
    _wait_free(case.topology.npus)
    return found


def _wait_free(npus: int) -> None:
    """Wait until Ray has all NPUs back, which it takes in the background: the next set must find an idle fleet."""
    import ray

    deadline = time.monotonic() + FREE_S
    while ray.available_resources().get("NPU", 0) < npus:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray did not give {npus} NPUs back within {FREE_S:.0f} s")
        time.sleep(0.1)


def breaks_a_rule(case: Case, wish: Request, engine: Placed) -> bool:
    """Say whether an engine sits against the rules of its chips."""
    nodes = {node.node_id: node for node in case.topology.nodes}
    places = [(bundle.node_id, bundle.npu or 0) for bundle in engine.bundles]
    used = {node_id: mask_of(npu for home, npu in places if home == node_id) for node_id, _ in places}
    if len({nodes[node_id].soc for node_id in used}) > 1:
        return True
    if wish.expert_parallel and len({nodes[node_id].fabric for node_id in used}) > 1:
        return True
    for node_id, mask in used.items():
        shape = nodes[node_id].shape
        halved = any(mask & pair not in (0, pair) for pair in shape.packages)
        if wish.npus > 1 and (halved or illegal(shape, wish.tensor_parallel_size, wish.groups)):
            return True
    size = wish.tensor_parallel_size
    for first in range(0, len(places), size):
        group = places[first : first + size]
        homes = {node_id for node_id, _ in group}
        mask = mask_of(npu for _, npu in group)
        if len(homes) > 1 or not any(mask & domain == mask for domain in nodes[group[0][0]].shape.domains):
            return True
    return False
