"""The Ascend chips that the fleet knows: their family, and how a server of them is wired unless it says so itself.

Sources: product pages of the Atlas 800 A2/A3 servers, the 200T A2 Box16 and the 300I Duo; names as
``aclrtGetSocName`` and npu-smi give them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum


class Family(StrEnum):
    """Generations that are wired alike."""

    A2 = "A2"  # 910B: eight chips in an HCCS full mesh, or two such modules in one server (Box16)
    A3 = "A3"  # 910C: two dies a package joined by SIO, packages and nodes of a super-pod joined by HCCS
    P310 = "310P"  # PCIe cards, no HCCS
    A5 = "A5"  # 950


_FAMILIES = (
    (re.compile(r"910_?93\w*"), Family.A3),
    (re.compile(r"910B\w*"), Family.A2),
    (re.compile(r"310P\w*"), Family.P310),
    (re.compile(r"950\w*"), Family.A5),
)
RING = 8  # NPUs of an HCCS module of A2


def family_of(soc: str) -> Family | None:
    """Return the family of a chip by its name (with or without ``Ascend``), None if it is not known."""
    name = soc.removeprefix("Ascend")
    return next((family for pattern, family in _FAMILIES if pattern.fullmatch(name)), None)


def hbm_mib(soc: str) -> int:
    """Return the memory of one NPU in MiB as npu-smi counts it, 0 if the chip is not known."""
    family = family_of(soc)
    if family is Family.A2:
        return 32768 if soc.endswith("B4") else 65536
    return {Family.A3: 65536, Family.P310: 24576}.get(family, 0) if family else 0


def domains(family: Family | None, indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return how the NPUs of a server are joined: two modules on an A2 server of more than eight, else one mesh."""
    if family is Family.A2 and len(indices) > RING:
        modules = (tuple(i for i in indices if i < RING), tuple(i for i in indices if i >= RING))
        return tuple(module for module in modules if module)
    return (tuple(indices),) if indices else ()


def packages(family: Family | None, indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the die pairs 2k and 2k+1 of an A3 server; other chips have none."""
    if family is not Family.A3:
        return ()
    present = set(indices)
    return tuple((i, i + 1) for i in indices if i % 2 == 0 and i + 1 in present)
