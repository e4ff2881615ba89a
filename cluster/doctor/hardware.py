"""Checks of the node's NPUs and of what they need of the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..placement.ports import HCCL_BASE
from ..topology.chips import Family, family_of
from ..topology.labels import ranges
from ..topology.npu_smi import Chip
from ..topology.npu_smi import info as npu_smi_info
from ..topology.sources.device_files import device_indices
from ..topology.sources.environment import MASK, visible
from ..topology.sources.npu_smi import Here as this_machine
from ..topology.sources.npu_smi import run as npu_smi
from .finding import Finding, Level

HCCN_TOOL = "hccn_tool"
LINK_S = 10.0
BUSY_SHARE = 0.1  # of an NPU's memory: more than the driver keeps for itself
WEIGHTS_GOOD = 100 << 30
"""Free bytes for checkpoints that a server should have."""
HUGE_PAGES = Path("/proc/meminfo")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def npus() -> Iterator[Finding]:
    """Yield findings about the real NPUs of this machine: health, memory, visibility, links."""
    rows = npu_smi_info(npu_smi("info"))
    if not rows:
        yield Finding(
            name="npu-smi",
            level=Level.WARN,
            text="says nothing, so health and memory of the NPUs are not known",
            remedy="install the driver's tools, or map npu-smi and the driver's libraries into the container",
        )
    for row in rows:
        yield health(row)
    yield from visibility(len(rows), device_indices(Path("/dev")), os.environ.get(MASK))
    told = this_machine().look()
    yield from links(told.soc or "", told.indices or ())


def health(row: Chip) -> Finding:
    """Check one NPU: its health, and whether something else holds its memory."""
    name = f"NPU {row.npu}.{row.chip}"
    if row.health != "OK":
        level = Level.WARN if row.health == "Warning" else Level.FAIL
        remedy = (
            f"npu-smi info -t health -i {row.npu} -c {row.chip} names the fault; leave it out with {MASK}"
        )
        return Finding(name=name, level=level, text=f"{row.name} health {row.health}", remedy=remedy)
    if row.hbm_mib and row.used_mib > BUSY_SHARE * row.hbm_mib:
        return Finding(
            name=name,
            level=Level.WARN,
            text=f"{row.name}: {row.used_mib} of {row.hbm_mib} MiB are in use",
            remedy="`npu-smi info` lists the processes at its end; stop what is not meant to run",
        )
    return Finding(name=name, level=Level.OK, text=f"{row.name} {row.hbm_mib} MiB")


def visibility(listed: int, files: tuple[int, ...], mask: str | None) -> Iterator[Finding]:
    """Yield findings about whether programs here can open what the driver lists.

    Args:
        listed: chips that npu-smi lists, 0 if it says nothing.
        files: indices of the device files.
        mask: the mask of visible devices, None if there is none.
    """
    if listed and listed != len(files):
        yield Finding(
            name="device files",
            level=Level.FAIL if len(files) < listed else Level.WARN,
            text=f"npu-smi lists {listed} NPUs, /dev has {len(files)} device files",
            remedy="map /dev/davinciN of every NPU into the container, and set Ray's NPU count with `npufleet node`",
        )
    try:
        shown = visible(mask)
    except ValueError as error:
        yield Finding(name=MASK, level=Level.FAIL, text=str(error), remedy=f"unset {MASK}")
        return
    if shown is None:
        return
    hidden = sorted(set(shown) - set(files))
    if hidden:  # the runtime drops them silently, and ranks then wait for ever
        text = f"names {', '.join(map(str, hidden))}, which /dev has not"
        yield Finding(name=MASK, level=Level.FAIL, text=text, remedy=f"name indices out of {list(files)}")
    else:
        yield Finding(name=MASK, level=Level.OK, text=f"shows {len(shown)} of {len(files)} NPUs")


def links(soc: str, indices: Iterable[int], ask: Callable[..., str] | None = None) -> Iterator[Finding]:
    """Yield findings about the NPUs' network ports, on chips that have them: links that are down, TLS switches that
    differ (two NPUs whose switches differ never connect).

    Args:
        soc: the chip.
        indices: the NPUs.
        ask: runs the tool with arguments and returns what it printed; the machine's own if None.
    """
    if family_of(soc) not in (Family.A2, Family.A3):
        return
    if ask is None and shutil.which(HCCN_TOOL) is None:
        yield Finding(
            name=HCCN_TOOL,
            level=Level.WARN,
            text="not found, so links, TLS and addresses of the NPUs cannot be looked at here",
            remedy=f"map {HCCN_TOOL} and /etc/hccn.conf into the container",
        )
        return
    tell = ask or _hccn_tool
    down, switches = [], dict[str, list[int]]()
    for index in indices:
        state = re.search(r"link status:\s*(\S+)", tell("-i", str(index), "-link", "-g"))
        if state is None or state[1] != "UP":
            down.append(index)
        if switch := re.search(r"switch\[(\d)\]", tell("-i", str(index), "-tls", "-g")):
            switches.setdefault(switch[1], []).append(index)
    yield _judge_links(down)
    if len(switches) > 1:
        text = "; ".join(f"{value} on NPU {ranges(npus)}" for value, npus in switches.items())
        remedy = f"{HCCN_TOOL} -i N -tls -s enable 0, the same on every node"
        yield Finding(
            name="TLS of NPUs", level=Level.FAIL, text=f"the switches differ: {text}", remedy=remedy
        )
    elif switches:
        yield Finding(name="TLS of NPUs", level=Level.OK, text=f"switch {next(iter(switches))} on all")


def _judge_links(down: list[int]) -> Finding:
    if not down:
        return Finding(name="RoCE links", level=Level.OK, text="all up")
    return Finding(
        name="RoCE links",
        level=Level.WARN,
        text=f"not up: NPU {ranges(down)}",
        remedy=f"look at cable, module and switch port ({HCCN_TOOL} -i N -lldp -g, -net_health -g); a single node "
        "serves without them",
    )


def _hccn_tool(*arguments: str) -> str:
    try:
        done = subprocess.run(
            [HCCN_TOOL, *arguments], capture_output=True, text=True, timeout=LINK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def huge_pages(file: Path = HUGE_PAGES) -> Finding:
    """Report huge pages: transfers of KV caches between hosts register host memory in them."""
    try:
        told = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        total, free = int(told["HugePages_Total"]), int(told["HugePages_Free"])
    except (OSError, KeyError, ValueError):
        return Finding(name="huge pages", level=Level.OK, text="not reported by this system")
    if total and not free:
        return Finding(
            name="huge pages",
            level=Level.WARN,
            text=f"all {total} are in use",
            remedy="raise vm.nr_hugepages, or stop what holds them (ipcs -m, files in /dev/hugepages)",
        )
    return Finding(name="huge pages", level=Level.OK, text=f"{free} of {total} free")


def ephemeral_ports(file: Path = PORT_RANGE) -> Finding:
    """Check that the system gives no program a port out of the blocks that engines keep for HCCL."""
    name = "ephemeral ports"
    try:
        first, last = (int(word) for word in file.read_text().split())
    except (OSError, ValueError):
        return Finding(name=name, level=Level.OK, text="not reported by this system")
    if last < HCCL_BASE:
        return Finding(name=name, level=Level.OK, text=f"{first} to {last}")
    return Finding(
        name=name,
        level=Level.WARN,
        text=f"{first} to {last}, and HCCL listens from {HCCL_BASE} on: a start may find its port taken",
        remedy=f"sysctl -w net.ipv4.ip_local_port_range='{min(first, 32768)} {HCCL_BASE - 1}'",
    )


def disk(folder: Path) -> Finding:
    """Check the room for checkpoints where the fleet keeps them."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    good = free >= WEIGHTS_GOOD
    return Finding(
        name="disk for weights",
        level=Level.OK if good else Level.WARN,
        text=f"{free >> 30} GiB free for {folder}",
        remedy="" if good else "keep checkpoints on a larger disk and name that path as models[].source",
    )


def sources(wanted: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yield for each (model, checkpoint folder) whether this node can read it."""
    for model, source in wanted:
        name, config = f"model {model}", Path(source) / "config.json"
        if os.access(config, os.R_OK):
            yield Finding(name=name, level=Level.OK, text=source)
        else:
            why = "cannot be read" if config.exists() else "does not exist"
            yield Finding(
                name=name,
                level=Level.FAIL,
                text=f"{config} {why} on this node",
                remedy="copy or mount the checkpoint at the same path on every node",
            )
