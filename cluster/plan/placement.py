"""``npufleet plan placement``: where the engines of a fleet would sit, on a cluster or on servers not there yet."""

from __future__ import annotations

import argparse
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import config, preflight
from ..placement import cost, planner, ray_state, requests
from ..placement.plan import NoRoom, Plan, Request, placed_as
from ..topology import simulated
from ..topology.labels import ranges
from ..topology.model import Topology

_EPILOG = """\
examples:
  npufleet plan placement fleet.yaml --servers a3=4,a2=2
  npufleet plan placement fleet.yaml --address auto
"""

MOST_SERVERS = 4096


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``placement`` to what ``plan`` can plan."""
    made = kinds.add_parser(
        "placement",
        help="which NPUs each engine gets, or why it finds no room",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("target", metavar="CONFIG.yaml", help="the fleet to place")
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", help="a Ray cluster ('auto' or HOST:PORT), with what runs there now")
    where.add_argument("--servers", metavar="KIND=N,…", help=f"idle servers: {', '.join(simulated.SERVERS)}")
    made.add_argument("--json", action="store_true", help="print the plans as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plans; 0 if every engine finds room, 1 if one does not.

    Raises:
        ValueError: for a configuration, servers or an address that are wrong.
    """
    fleet = config.from_yaml(Path(args.target))
    wanted = [requests.of(model, f"{model.name} {i}") for model in fleet.models for i in range(model.engines)]
    topology, free = _cluster(args.address) if args.servers is None else _servers(args.servers)
    made = planner.plan_all(topology, free, wanted)
    if args.json:
        print(json.dumps([as_data(request, made[request.engine_id]) for request in wanted], indent=2))
    else:
        print("\n".join(render(topology, free, wanted, made)))
    return 1 if any(isinstance(plan, NoRoom) for plan in made.values()) else 0


def _servers(text: str) -> tuple[Topology, Mapping[str, int]]:
    counts: dict[str, int] = {}
    for item in text.split(","):
        kind, _, count = item.partition("=")
        number = int(count) if count.isascii() and count.isdigit() else 0
        if kind not in simulated.SERVERS or not 1 <= number <= MOST_SERVERS:
            known = ", ".join(simulated.SERVERS)
            raise ValueError(
                f"--servers {item!r}: expected KIND=NUMBER from 1 to {MOST_SERVERS:,} of one of {known}, for "
                "example a3=4"
            )
        counts[kind] = counts.get(kind, 0) + number
    topology = simulated.fleet(counts)
    return topology, planner.idle(topology)


def _cluster(address: str) -> tuple[Topology, Mapping[str, int]]:
    import ray

    try:
        preflight.cluster(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:  # ConnectionError is one
        raise ValueError(f"--address {address!r}: no Ray cluster there: {error}") from error
    try:
        state = ray_state.read()
    finally:
        ray.shutdown()
    return state.topology, state.free()


def render(
    topology: Topology, free: Mapping[str, int], wanted: list[Request], made: Mapping[str, Plan | NoRoom]
) -> Iterator[str]:
    """Yield the plans as text, an engine a line, and what they cost together."""
    titles = {node.node_id: node.title for node in topology.nodes}
    busy = {node.node_id: node.usable & ~free.get(node.node_id, 0) for node in topology.nodes}
    width = max(len(request.engine_id) for request in wanted)
    sitting = []
    for request in wanted:
        plan = made[request.engine_id]
        if isinstance(plan, NoRoom):
            yield f"{request.engine_id:<{width}}  no room: {plan}"
            continue
        sitting.append(placed_as(request, plan.bundles))
        shares = (f"{titles[node]} NPU {ranges(npus)}" for node, npus in by_node(plan).items())
        yield f"{request.engine_id:<{width}}  {', '.join(shares)}"
    used = sum(request.npus for request in wanted if isinstance(made[request.engine_id], Plan))
    yield (
        f"{len(sitting)} of {len(wanted)} engines placed on {used} of {topology.npus} NPUs, "
        f"cost {cost.of(topology, sitting, busy)}"
    )


def by_node(plan: Plan) -> dict[str, list[int]]:
    """Return the NPUs of a plan by node, in the order of its ranks."""
    found: dict[str, list[int]] = defaultdict(list)
    for bundle in plan.bundles:
        assert bundle.npu is not None, bundle
        found[bundle.node_id].append(bundle.npu)
    return dict(found)


def as_data(request: Request, plan: Plan | NoRoom) -> dict[str, Any]:
    """Return one plan or refusal as plain data; ``bundles`` are in rank order."""
    told: dict[str, Any] = {"engine": request.engine_id, "model": request.model, "npus": request.npus}
    if isinstance(plan, NoRoom):
        return {**told, "refused": str(plan), "rule": str(plan.rule), "never": plan.never}
    return {**told, "bundles": [{"node": bundle.node_id, "npu": bundle.npu} for bundle in plan.bundles]}
