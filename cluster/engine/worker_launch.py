"""Starts one worker process with the settings of its own node: ``python -m …worker_launch [NODE=PORT …] -- WORKER …``.

Ray starts the workers of an engine with one environment for all. HCCL, gloo and tensorpipe need each host's own
address and interface instead, or they meet on the wrong network or not at all; so Ray starts this, which finds them
and becomes the worker. What the node's own environment says wins.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from .. import env
from . import sockets

SEPARATOR = "--"
ADDRESS_FLAG = "--node-ip-address="
"""How Ray tells a worker the address of its node."""
RANK_TABLE_FILE = "RANK_TABLE_FILE"
"""What torch_npu and HCCL read."""
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def command(python: str, ports: Mapping[str, int]) -> str:
    """Return what Ray has to start in place of Python.

    Args:
        python: the interpreter.
        ports: HCCL_IF_BASE_PORT by the address of a node.
    """
    told = [f"{address}={port}" for address, port in sorted(ports.items())]
    return " ".join([python, "-m", __name__, *told, SEPARATOR])


def main(arguments: Sequence[str]) -> None:
    """Become the worker."""
    at = list(arguments).index(SEPARATOR)
    told, worker = arguments[:at], list(arguments[at + 1 :])
    address = next((a.removeprefix(ADDRESS_FLAG) for a in worker if a.startswith(ADDRESS_FLAG)), "")
    ports = dict(entry.rsplit("=", 1) for entry in told)
    for name, value in environment(address, interface_of(address), ports.get(address)).items():
        os.environ.setdefault(name, value)
    sockets.make_on_other_node()
    if table := os.environ.get(env.RANK_TABLE):
        os.environ.setdefault(RANK_TABLE_FILE, str(write_rank_table(table)))
    os.execv(sys.executable, [sys.executable, *worker])


def environment(address: str, interface: str, port: str | None) -> dict[str, str]:
    """Return the settings of a node; on loopback there is but one host, and nothing to choose."""
    found: dict[str, str] = {}
    if address and interface and not address.startswith("127."):
        found = {"HCCL_IF_IP": address, **dict.fromkeys(INTERFACES, interface)}
    if port:
        found["HCCL_IF_BASE_PORT"] = port
    return found


def write_rank_table(table: str) -> Path:
    """Write a rank table on this node and return its file, named after what it says: engines that sit alike share it.

    HCCL takes no symbolic link, and the file must be whole when the first of several workers reads it.
    """
    folder = env.home() / "rank-tables"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{hashlib.sha256(table.encode()).hexdigest()[:16]}.json"
    descriptor, made = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "w") as file:
        file.write(table)
    os.replace(made, path)
    return path


def interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``, empty if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
