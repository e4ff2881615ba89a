"""What the plugin asks of the device: operations, waits, bytes between NPUs, and the host's time.

    python -m benchmarks.plugin                     everything
    python -m benchmarks.plugin --part operations   one part; --family llama: one family

operations   device operations per decoder layer and per decode step, against vLLM's plain layers (plugin_plain.py)
collectives  bytes per layer of each collective, against the formula
host         host time per decode step in null mode, and where it goes

Counts are exact. Times are wall clock on whatever else the machine does. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import forks
from .parity import FAMILIES

PARTS = ("operations", "collectives", "host")
WIDE = {"DeepSeek V3, published sizes": "deepseek-v3-wide"}
"""Families whose sizes operators of their own take, in bfloat16: there the tokens of other layers may differ."""
DEVICE = "virtual:8:Ascend910_9392,hbm=16GiB"  # A3, where large steps go all-to-all
DEADLINE = 300.0
BATCH, STEPS = 8, 16


def count_operations(path: Path, settings: dict[str, Any], plain: bool) -> Iterator[dict[str, Any]]:
    """Counts of decode steps on one NPU, and the tokens that they made."""
    from tests.parity.engines import engine

    from . import plugin_counts, plugin_plain

    if plain:
        plugin_plain.register()
        settings = {**settings, **plugin_plain.SETTINGS}
    with engine(path, **settings) as llm:
        if settings.get("enforce_eager", True):
            llm.collective_rpc(plugin_counts.watch)
        (found,), tokens = plugin_counts.decode(llm, BATCH, STEPS)
        yield {**found, "tokens": tokens}


def operations(families: dict[str, str], folder: Path) -> tuple[list[str], bool]:
    """The table of device operations, and whether every layer needs fewer than a plain one for the same tokens."""
    from tests.parity.checkpoints import BY_NAME, write
    from tests.parity.engines import GRAPHS

    lines = [
        f"Device operations of a decode step of {BATCH} requests; layer: the last one; plain: vLLM's own layers",
        "",
        "| family | layer, plain | layer | step, plain | step | step, graph | waits | same tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = True
    for title, name in families.items():
        path = write(BY_NAME[name], folder)
        dtype = {"dtype": "bfloat16"} if title in WIDE else {}
        runs = {"plain": (dtype, True), "ours": (dtype, False), "graph": ({**GRAPHS, **dtype}, False)}
        found = {}
        for run, (settings, plain) in runs.items():
            work = partial(count_operations, path, settings, plain)
            try:
                (found[run],) = forks.answers(work, folder / "log", DEADLINE)
            except forks.Broken:
                sys.stderr.write((folder / "log").read_text()[-4000:])
                raise
        layer = {run: sum(found[run]["layers"][-1]["ops"].values()) for run in ("plain", "ours")}
        step = {run: sum(one["ops"].values()) / STEPS for run, one in found.items()}
        waits = sum(found["graph"]["waits"].values()) / STEPS
        same = len({str(one["tokens"]) for one in found.values()}) == 1
        good = good and (same or title in WIDE) and layer["ours"] < layer["plain"]
        lines.append(
            f"| {title} | {layer['plain']} | {layer['ours']} | {step['plain']:.0f} | {step['ours']:.0f} "
            f"| {step['graph']:.0f} | {waits:.1f} | {'yes' if same else 'no'} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines, good


def host(quick: bool) -> list[str]:
    """Host time per decode step of the demo model in null mode."""
    from npufleet.cluster import demo_model

    from . import plugin_host

    return plugin_host.table(plugin_host.measure(demo_model.ensure(), quick))


def main(argv: list[str] | None = None) -> int:
    """Run the parts and print their tables; 1 if a plain layer needs no more operations, or tokens or bytes differ."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    every = FAMILIES | WIDE
    made.add_argument("--family", action="append", choices=sorted(every.values()), help="repeatable")
    made.add_argument("--quick", action="store_true", help="fewer steps of the host part")
    args = made.parse_args(argv)
    os.environ.update(forks.ENVIRONMENT, NPUFLEET_DEVICE=DEVICE)
    began, parts = time.monotonic(), args.part or PARTS
    fewer = equal = True
    with tempfile.TemporaryDirectory() as folder:
        if "operations" in parts:
            families = {t: n for t, n in every.items() if not args.family or n in args.family}
            lines, fewer = operations(families, Path(folder))
            print("\n".join(lines), flush=True)
        if "collectives" in parts:
            from . import plugin_collectives

            lines, equal = plugin_collectives.table(Path(folder))
            print("\n".join(lines), flush=True)
    if "host" in parts:
        print("\n".join(host(args.quick)), flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(not (fewer and equal))


if __name__ == "__main__":
    sys.exit(main())
