"""``npufleet doctor``: prints findings and returns an exit code that scripts can use."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import checks, config, preflight
from . import examine
from .finding import Finding, Level

_EPILOG = """\
examples:
  npufleet doctor                               this machine
  npufleet doctor --config fleet.yaml           its ports, checkpoints and keys too
  npufleet doctor --nodes all                   every node of the Ray cluster, clocks, an all-reduce over HCCL
  npufleet doctor --nodes 10.0.0.2,10.0.0.3 --address 10.0.0.1:6379 --json
"""


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="check that this machine or a cluster is ready to serve",
        description="Exit code 0: ready, maybe with warnings; 1: something must be mended first; 2: wrong use.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "--nodes", metavar="all|ADDRESSES", help="nodes of a Ray cluster instead of this machine"
    )
    doctor.add_argument("--address", default="auto", help="the Ray cluster for --nodes (default %(default)s)")
    doctor.add_argument(
        "--expect", type=int, metavar="N", help="with --nodes: fail unless the cluster has N nodes"
    )
    doctor.add_argument("--config", type=Path, metavar="YAML", help="also what this FleetConfig needs")
    doctor.add_argument("--meet", action="store_true", help="let two NPUs of this machine run an all-reduce")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if nothing failed, 1 otherwise.

    Raises:
        ValueError: for a configuration or nodes that are wrong.
    """
    if args.nodes is not None:
        checks.text(args.nodes, "--nodes")
    elif args.expect is not None:
        raise ValueError("--expect counts the nodes of a cluster: give --nodes all too")
    failed = False
    data: list[dict[str, Any]] = []
    shown = ""
    for where, finding in _findings(args):
        failed |= finding.level is Level.FAIL
        if args.json:
            data.append({**({"node": where} if where else {}), **asdict(finding)})
            continue
        if where != shown:
            print(f"{where}:")
            shown = where
        print(f"{finding.level:>4}  {finding.name:<24} {finding.text}", flush=True)
        if finding.remedy:
            print(f"      {'':<24} -> {finding.remedy}")
    if args.json:
        print(json.dumps(data, indent=2))
    return 1 if failed else 0


def _findings(args: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    made = config.from_yaml(args.config) if args.config else None
    models = examine.models_of(made) if made else []
    if args.nodes is None:
        ports = examine.ports_of(made) if made else None
        yield from (("", finding) for finding in examine.machine(ports, models, meet=args.meet))
        if made:
            yield "", examine.doors_of(made.gateway, made.router)
        return
    import ray

    from . import nodes

    try:
        preflight.cluster(args.address)
        ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:  # ConnectionError is one
        yield (
            "",
            Finding(
                name="Ray",
                level=Level.FAIL,
                text=f"no cluster at {args.address!r}: {error}",
                remedy="start one, or name its head with --address HOST:PORT (and set RAY_AUTH_MODE=token if it asks "
                "for a token)",
            ),
        )
        return
    try:
        yield from nodes.examine(args.nodes, models, expect=args.expect)
    finally:
        ray.shutdown()
