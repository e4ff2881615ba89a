"""A node as Ray labels and resources, and back: how the controller learns what a node has.

``npufleet node`` computes both on the node; ``ray start`` hands them on. Label values hold letters, digits,
``-``, ``_`` and ``.`` only, 63 of them at most, so lists of NPU indices are written as ranges: ``0-3_6`` is
0, 1, 2, 3, 6, and ``0-7.8-15`` two groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .. import checks
from . import facts
from .facts import Facts
from .model import Node

RESOURCE = "NPU"  # the name that Ray's own accelerator support gives Ascend NPUs
TYPE = "ray.io/accelerator-type"  # the node label that names the chip
PREFIX = "npufleet/"
DEVICES = f"{PREFIX}devices"
UNHEALTHY = f"{PREFIX}unhealthy"
HCCS = f"{PREFIX}hccs"
PACKAGES = f"{PREFIX}packages"
SUPER_POD = f"{PREFIX}super-pod"
NETWORK = f"{PREFIX}network"
FAILURE_DOMAIN = f"{PREFIX}failure-domain"
HBM = f"{PREFIX}hbm-mib"
INTERFACE = f"{PREFIX}interface"
ADDRESS = f"{PREFIX}npu-address."  # and the NPU's index
MAX_VALUE = 63
_INDEX = re.compile(r"[0-9]{1,4}")

_TEXTS = {
    SUPER_POD: "super_pod",
    NETWORK: "network",
    FAILURE_DOMAIN: "failure_domain",
    INTERFACE: "interface",
}


def npu_resource(index: int) -> str:
    """Return the name of the Ray resource that stands for one NPU of a node."""
    return f"npufleet-npu-{index}"


def resources(node: Node) -> dict[str, int]:
    """Return the Ray resources of a node: its healthy NPUs, and each of them by its index."""
    healthy = [npu.index for npu in node.devices if npu.healthy]
    return {RESOURCE: len(healthy), **{npu_resource(index): 1 for index in healthy}}


def to_labels(node: Node) -> dict[str, str]:
    """Return the Ray labels of a node; what is not known is left out.

    Raises:
        ValueError: if a value is longer than Ray allows.
    """
    made = {TYPE: node.soc, DEVICES: ranges(npu.index for npu in node.devices)}
    made[UNHEALTHY] = ranges(npu.index for npu in node.devices if not npu.healthy)
    made[HCCS] = ".".join(ranges(domain) for domain in node.domains)
    made[PACKAGES] = _packages(node)
    made |= {label: getattr(node, name) for label, name in _TEXTS.items()}
    made[HBM] = str(node.hbm_mib or "")
    made |= {f"{ADDRESS}{npu.index}": npu.address.replace(":", "_") for npu in node.devices if npu.address}
    for label, value in made.items():
        if len(value) > MAX_VALUE:
            raise ValueError(
                f"label {label}: {value!r} is longer than the {MAX_VALUE} letters that Ray allows"
            )
    return {label: value for label, value in made.items() if value}


def from_ray(entry: Mapping[str, Any]) -> Node:
    """Return the node that one entry of ``ray.nodes()`` describes.

    A node without our labels has as many NPUs as Ray counts, indexed from 0, wired as its chip usually is.

    Raises:
        ValueError: if one of our labels does not parse; the message names the node and the label.
    """
    told, resources_ = dict(entry.get("Labels") or {}), entry.get("Resources") or {}
    count = int(resources_.get(RESOURCE, 0))
    where = entry.get("NodeManagerAddress") or entry["NodeID"][:12]
    indices = _read(told, DEVICES, where)
    unhealthy = _read(told, UNHEALTHY, where)
    exact = indices is not None and all(
        npu_resource(i) in resources_ for i in set(indices) - set(unhealthy or ())
    )
    said = Facts(
        indices=tuple(range(count)) if indices is None else indices,
        unhealthy=unhealthy,
        soc=told.get(TYPE),
        domains=_groups(told, HCCS, where),
        packages=_groups(told, PACKAGES, where),
        addresses={
            int(label.removeprefix(ADDRESS)): value.replace("_", ":")
            for label, value in told.items()
            if label.startswith(ADDRESS) and label.removeprefix(ADDRESS).isdigit()
        },
        hbm_mib=int(told[HBM]) if told.get(HBM, "").isdigit() else None,
        address=entry.get("NodeManagerAddress", ""),
        **{name: told.get(label) for label, name in _TEXTS.items()},
    )
    return facts.node(entry["NodeID"], said, exact=exact)


def ranges(indices: Iterable[int]) -> str:
    """Return indices as text: ``0-3_6``."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "_".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the indices that :func:`ranges` wrote.

    Raises:
        ValueError: if ``text`` is no such list.
    """
    found: set[int] = set()
    for part in text.split("_"):
        first, dash, last = part.partition("-")
        if not _INDEX.fullmatch(first) or (dash and not _INDEX.fullmatch(last)):
            raise ValueError(f"{checks.shown(text)} is no list of NPU indices such as 0-3_6")
        low, high = int(first), int(last if dash else first)
        if high < low:
            raise ValueError(f"{part!r} in a list of NPU indices ends before it begins")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _packages(node: Node) -> str:
    """Die pairs as groups; the usual ones (2k, 2k+1) follow from the chip and need no label."""
    usual = facts.node("", Facts(indices=tuple(npu.index for npu in node.devices), soc=node.soc)).packages
    return "" if node.packages == usual else ".".join(ranges(group) for group in node.packages)


def _read(told: Mapping[str, str], label: str, where: str) -> tuple[int, ...] | None:
    groups = _groups(told, label, where)
    return None if groups is None else tuple(index for group in groups for index in group)


def _groups(told: Mapping[str, str], label: str, where: str) -> tuple[tuple[int, ...], ...] | None:
    if not told.get(label):
        return None
    try:
        return tuple(parse_ranges(part) for part in told[label].split("."))
    except ValueError as error:
        raise ValueError(f"node {where}: label {label}: {error}") from error
