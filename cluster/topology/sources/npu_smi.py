"""What ``npu-smi`` says: NPUs, chips, health, memory, HCCS and SIO links, the super-pod."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from .. import chips
from ..facts import Facts
from ..npu_smi import Chip, Link, board, info, mapping, meshes, super_pod, topo

TIMEOUT_S = 30.0
WELL = ("OK", "Warning")  # a warning is looked at by `npufleet doctor`; the NPU computes
COMMAND = "npu-smi"

Ask = Callable[..., str]
"""Runs npu-smi with arguments and returns what it printed, empty if it failed."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """npu-smi of this machine."""

    ask: Ask | None = None

    def look(self) -> Facts:
        """Return what npu-smi says; nothing where there is none."""
        ask = self.ask or run
        rows = info(ask("info"))
        if not rows:
            return Facts()
        named = mapping(ask("info", "-m"))
        indices = {row: named.get((row.npu, row.chip), _own_index(row, rows)) for row in rows}
        links = topo(ask("info", "-t", "topo"))
        first = rows[0]
        pod = super_pod(ask("info", "-t", "spod-info", "-i", str(first.npu), "-c", str(first.chip)))
        memory = {row.hbm_mib for row in rows if row.hbm_mib}
        return Facts(
            indices=tuple(sorted(indices.values())),
            unhealthy=tuple(sorted(index for row, index in indices.items() if row.health not in WELL)),
            soc=soc(first, board(ask("info", "-t", "board", "-i", str(first.npu), "-c", str(first.chip)))),
            domains=meshes(links, Link.HCCS) or None,
            packages=meshes(links, Link.SIO) or None,
            super_pod=pod,
            hbm_mib=min(memory) if memory else None,
        )


def _own_index(row: Chip, rows: list[Chip]) -> int:
    """The index of a chip that the mapping does not name: its physical id, else its place in the list."""
    return rows.index(row) if row.physical is None else row.physical


def soc(row: Chip, told: dict[str, str]) -> str:
    """Return the chip's name as CANN gives it.

    The list names A2 chips in full (``910B2``); for A3 it says ``Ascend910``, and the board names the variant.
    """
    name = row.name.removeprefix("Ascend")
    variant = told.get("NPU Name", "")
    if chips.family_of(name) is None and variant.isdigit():
        name = f"{name}_{variant}"
    return f"Ascend{name}"


def run(*arguments: str) -> str:
    """Run npu-smi and return what it printed, empty if it is not there, fails or hangs."""
    path = shutil.which(COMMAND)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
