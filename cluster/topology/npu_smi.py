"""Reads the texts that ``npu-smi`` prints; column widths differ between its versions, so only separators count."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]|NA")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_ROW = re.compile(r"^\s*(?:NPU|Phy-ID)\s?(\d+)\s+(.*)$")
_HEAD = re.compile(r"(?:NPU|Phy-ID)\s?(\d+)")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip (die) of the list that ``npu-smi info`` prints."""

    npu: int
    chip: int
    physical: int | None
    name: str
    health: str
    bus: str
    hbm_mib: int
    used_mib: int


class Link(StrEnum):
    """How two NPUs are joined, the fast ones of what ``npu-smi info -t topo`` tells apart."""

    HCCS = "HCCS"
    SIO = "SIO"


def info(text: str) -> list[Chip]:
    """Return the chips of ``npu-smi info``: two lines each, the second one with a bus address."""
    found: list[Chip] = []
    first: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        if _BUS.fullmatch(cells[1]) and first is not None:
            found.append(_chip(first, cells))
        elif (words := cells[0].split()) and words[0].isdigit() and len(words) > 1:
            first = cells
    return found


def _chip(first: list[str], second: list[str]) -> Chip:
    npu, name, *_ = first[0].split()
    ids = [int(word) for word in second[0].split() if word.isdigit()]
    memory = _PAIR.findall(second[2])
    used, total = memory[-1] if memory else ("0", "0")  # HBM comes last; chips without HBM show one pair only
    return Chip(
        npu=int(npu),
        chip=ids[0] if ids else 0,
        physical=ids[1] if len(ids) > 1 else None,
        name=name,
        health=first[1],
        bus=second[1],
        hbm_mib=int(total),
        used_mib=int(used),
    )


def mapping(text: str) -> dict[tuple[int, int], int]:
    """Return the index that programs use by (NPU ID, Chip ID), from ``npu-smi info -m``.

    The logic id is that index; forms without one have the physical id. Rows of the board's controller (Mcu)
    have ``-`` there.
    """
    header: list[str] = []
    found: dict[tuple[int, int], int] = {}
    for line in text.splitlines():
        cells = [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]
        if {"NPU ID", "Chip ID"} <= set(cells):
            header = cells
            continue
        row = dict(zip(header, cells, strict=False))
        index = row.get("Chip Logic ID", row.get("Chip Phy-ID", ""))
        if index.isdigit() and row["NPU ID"].isdigit() and row["Chip ID"].isdigit():
            found[int(row["NPU ID"]), int(row["Chip ID"])] = int(index)
    return found


def board(text: str) -> dict[str, str]:
    """Return the lines ``name : value`` of ``npu-smi info -t board``."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def super_pod(text: str) -> str | None:
    """Return the super-pod's id from ``npu-smi info -t spod-info``, None where it has none."""
    told = {name.lower(): value for name, value in board(text).items()}
    return next(
        (value for name in ("super pod id", "superpod id") if (value := told.get(name, "")).isdigit()), None
    )


def topo(text: str) -> dict[tuple[int, int], str]:
    """Return the link between each two NPUs by their indices, from ``npu-smi info -t topo``."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in text.splitlines():
        row = _ROW.match(line)
        words = row[2].split() if row else []
        if row is None or (words and _HEAD.match(words[0])):  # the line of column names
            columns = [int(index) for index in _HEAD.findall(line)] or columns
            continue
        for column, link in zip(columns, words, strict=False):
            found[int(row[1]), column] = link
    return found


def meshes(links: Mapping[tuple[int, int], str], link: Link) -> tuple[tuple[int, ...], ...]:
    """Return the groups of NPUs that are joined by ``link``, or by a faster one, each group ascending."""
    fast = (Link.SIO,) if link is Link.SIO else (Link.SIO, Link.HCCS)
    near: dict[int, set[int]] = defaultdict(set)
    for (one, other), kind in links.items():
        near[one].add(one)
        if kind.startswith(fast):  # HCCS_SW is HCCS through a switch
            near[one].add(other)
    groups: list[tuple[int, ...]] = []
    for index in sorted(near):
        if any(index in group for group in groups):
            continue
        group, waiting = {index}, [index]
        while waiting:
            waiting += (new := near[waiting.pop()] - group)
            group |= new
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return tuple(groups)
