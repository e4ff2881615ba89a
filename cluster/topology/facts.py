"""What sources say about a node: each says what it knows, and the more trusted one wins field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import chips
from .model import Node, Npu


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one source knows of a node; None where it knows nothing."""

    indices: tuple[int, ...] | None = None
    unhealthy: tuple[int, ...] | None = None
    soc: str | None = None
    domains: tuple[tuple[int, ...], ...] | None = None
    packages: tuple[tuple[int, ...], ...] | None = None
    addresses: dict[int, str] | None = None
    """IP addresses of the NPUs' RoCE ports, by index."""
    super_pod: str | None = None
    network: str | None = None
    failure_domain: str | None = None
    hbm_mib: int | None = None
    address: str | None = None
    interface: str | None = None


def merge(*told: Facts) -> Facts:
    """Return for each field what the first source says that knows it."""
    found = {}
    for item in fields(Facts):
        values = [value for facts in told if (value := getattr(facts, item.name)) is not None]
        found[item.name] = values[0] if values else None
    return Facts(**found)


def node(node_id: str, told: Facts, *, exact: bool = False) -> Node:
    """Return the node that ``told`` describes; what it leaves open is taken from the chip's family.

    NPUs that are not present (hidden by a device mask, say) are left out of domains and packages.
    """
    indices = tuple(sorted(told.indices or ()))
    soc = told.soc or ""
    family = chips.family_of(soc)
    unhealthy, addresses = set(told.unhealthy or ()), told.addresses or {}
    wired = chips.domains(family, indices) if told.domains is None else told.domains
    paired = chips.packages(family, indices) if told.packages is None else told.packages
    present = set(indices)
    return Node(
        node_id=node_id,
        devices=tuple(
            Npu(index=i, healthy=i not in unhealthy, address=addresses.get(i, "")) for i in indices
        ),
        soc=soc,
        domains=tuple(kept for group in wired if (kept := tuple(i for i in group if i in present))),
        packages=tuple(group for group in paired if present.issuperset(group)),
        super_pod=told.super_pod or "",
        network=told.network or "",
        failure_domain=told.failure_domain or "",
        hbm_mib=chips.hbm_mib(soc) if told.hbm_mib is None else told.hbm_mib,
        address=told.address or "",
        interface=told.interface or "",
        exact=exact,
    )
