"""``npufleet node``: what this node has, as flags for ``ray start``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import facts, labels
from .model import Node
from .sources import here
from .sources.declared import Declared

_EPILOG = """\
examples:
  ray start --address=10.0.0.1:6379 $(npufleet node)
  ray start --head $(npufleet node --file /etc/npufleet/node.yaml)
  npufleet node --json
"""


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``node`` to the command line."""
    node = commands.add_parser(
        "node",
        help="what this node has, as labels and resources for `ray start`",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    node.add_argument("--file", type=Path, metavar="YAML", help="declares what no tool on the node tells")
    node.add_argument("--json", action="store_true", help="print the node as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the flags, or the node as JSON.

    Raises:
        ValueError: if a source says something that makes no sense.
    """
    node = this_node(args.file)
    if args.json:
        print(json.dumps(as_data(node), indent=2))
        return 0
    if not node.npus:
        print("npufleet: this node has no NPU; fit for a head or a gateway", file=sys.stderr)
    print(" ".join(flags(node)))
    return 0


def this_node(file: Path | None = None) -> Node:
    """Return the node of this process. Raises ``ValueError`` as :func:`run`."""
    return facts.node("", here(Declared(path=file) if file else None), exact=True)


def flags(node: Node) -> list[str]:
    """Return the flags of ``ray start`` that say what the node has; none holds a space, so a shell keeps them."""
    offered = json.dumps(labels.resources(node), separators=(",", ":"))
    told = ",".join(f"{label}={value}" for label, value in labels.to_labels(node).items())
    return [f"--resources={offered}", *([f"--labels={told}"] if told else [])]


def as_data(node: Node) -> dict[str, Any]:
    """Return the node, its labels and its resources as plain data."""
    data = asdict(node)
    del data["node_id"], data["exact"]
    return {**data, "labels": labels.to_labels(node), "resources": labels.resources(node)}
