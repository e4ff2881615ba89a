"""Nodes, NPUs and the links between them, as placement sees them.

An NPU is what has an index of its own on its node: a die on A3, a chip elsewhere. ``ASCEND_RT_VISIBLE_DEVICES``
counts in these indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .chips import Family, family_of


@dataclass(frozen=True, kw_only=True)
class Npu:
    """One NPU of a node."""

    index: int
    healthy: bool = True
    address: str = ""
    """IP address of its RoCE port, empty if not known."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All of a node that decides which of its NPUs can work together, as bit masks over NPU indices.

    Nodes of one kind share one shape, so what is computed for a shape is computed once for a fleet.
    """

    family: Family | None
    domains: tuple[int, ...]
    """NPUs joined by HCCS (by PCIe where the chip has none): a mask for each full mesh."""
    packages: tuple[int, ...]
    """Die pairs joined by SIO; empty where each package holds one NPU."""

    @cached_property
    def mask(self) -> int:
        """All NPUs."""
        return sum(self.domains)

    @cached_property
    def rings(self) -> bool:
        """Whether this is an A2 node of two HCCS modules of equal size (Box16)."""
        sizes = {domain.bit_count() for domain in self.domains}
        return self.family is Family.A2 and len(self.domains) == 2 and len(sizes) == 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.family, self.domains, self.packages))


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the fleet: its NPUs and where it stands."""

    node_id: str
    devices: tuple[Npu, ...] = ()
    soc: str = ""
    """The chip by CANN's name, for example Ascend910B3 or Ascend910_9391."""
    domains: tuple[tuple[int, ...], ...] = ()
    packages: tuple[tuple[int, ...], ...] = ()
    super_pod: str = ""
    network: str = ""
    """The RoCE network; nodes of different networks reach each other over the host only."""
    failure_domain: str = ""
    """What fails together, for example a rack; the node itself if empty."""
    hbm_mib: int = 0
    address: str = ""
    interface: str = ""
    """The host's network interface that carries ``address``."""
    exact: bool = False
    """Whether Ray knows each NPU by its index, so that a plan can bind ranks to indices."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def npus(self) -> int:
        """How many NPUs the node has, healthy or not."""
        return len(self.devices)

    @property
    def title(self) -> str:
        """How messages name the node."""
        return self.address or self.node_id[:12]

    @property
    def fabric(self) -> str:
        """The widest set of nodes that collectives cross at full speed: the super-pod, else the RoCE network."""
        return f"super-pod {self.super_pod}" if self.super_pod else f"network {self.network or 'default'}"

    @property
    def fails_with(self) -> str:
        """The failure domain; nodes that name none are one each."""
        return self.failure_domain or self.node_id

    @cached_property
    def shape(self) -> Shape:
        """The node's shape; NPUs that no domain names are domains of their own."""
        named = {index for domain in self.domains for index in domain}
        alone = [(npu.index,) for npu in self.devices if npu.index not in named]
        return Shape(
            family=family_of(self.soc),
            domains=tuple(mask_of(domain) for domain in (*self.domains, *alone)),
            packages=tuple(mask_of(package) for package in self.packages if len(package) > 1),
        )

    @cached_property
    def usable(self) -> int:
        """The healthy NPUs, as a mask."""
        return mask_of(npu.index for npu in self.devices if npu.healthy)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The nodes of the fleet."""

    nodes: tuple[Node, ...]

    @property
    def npus(self) -> int:
        """The NPUs of all nodes together."""
        return sum(node.npus for node in self.nodes)


def mask_of(indices: Iterable[int]) -> int:
    """Return the bit mask of NPU indices."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def indices_of(mask: int) -> tuple[int, ...]:
    """Return the NPU indices of a bit mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
