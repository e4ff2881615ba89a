"""The study as a page and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .study import TPOT_OBJECTIVE, TTFT_OBJECTIVE

Row = Mapping[str, Any]
ADMISSION = "admission"  # the title of runs whose router refuses what it predicts to be late

_HEAD = """\
# Routing quality

Written by `make bench-routing TRACE=…` (`benchmarks/routing`); do not edit by hand.

{which}
({requests:,} requests, {reuse:.1%} of their prompt blocks were seen before) goes through the real routing code to
simulated engines: block-level models of vLLM's scheduler and KV cache, equal to the real ones step for step in a
test, with the literature-calibrated preset of Qwen3-32B on four A3 dies. The virtual clock makes each run
repeatable. Blocks have 512 tokens, as in the trace; blocks of answers are not reused, because the trace does not
tell them.

Load 1.0 is what the fleet completes when each engine in turn gets the next request and none is ever idle:
{capacity}. Goodput is the share of requests with a first token within {ttft:g} s and then a token every
{tpot:.0f} ms or faster. Times are seconds. The last four policies are published formulas, re-implemented with
their published constants (`benchmarks/routing/formulas.py`); where a formula can use KV events, it gets them.
The best mean TTFT of each column is bold. Each cell is one run.

![Mean and 90th percentile of the time to first token](routing-benchmark.svg)
"""


_ADMISSION = """\
## With admission

The same runs with `predicted-ttft` and `admission.ttft_objective` of {ttft:g} s: the router refuses at once, with the
time to come back in, what it predicts to be later, so that the rest is in time. A refused request counts against
goodput; none comes back here.
"""


_WHICH = {
    "first": "The first half of `{trace}`, on which the weights of our policies were chosen",
    "second": "The second half of `{trace}`; the weights of our policies were chosen on the first half alone",
    "whole": "All of `{trace}`",
}


def page(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The whole page."""
    capacity = ", ".join(
        f"{rate:.2f} requests/s for {engines} engines" for engines, rate in facts["capacity"].items()
    )
    parts = [
        _HEAD.format(
            which=_WHICH[facts["part"]].format(trace=facts["trace"]),
            requests=facts["requests"],
            trace=facts["trace"],
            reuse=facts["reuse"],
            capacity=capacity,
            ttft=TTFT_OBJECTIVE,
            tpot=TPOT_OBJECTIVE * 1000,
        )
    ]
    main = [row for row in rows if not row["title"]]
    for engines in dict.fromkeys(row["engines"] for row in main):
        parts.append(f"## {engines} engines\n")
        some = [row for row in main if row["engines"] == engines]
        parts.append("Mean TTFT / p90 TTFT by load:\n")
        parts.append(
            _table(some, lambda row: f"{row['ttft_mean']:.2f} / {row['ttft_p90']:.2f}", best="ttft_mean")
        )
        parts.append("Hit rate / goodput by load:\n")
        parts.append(_table(some, lambda row: f"{row['hit_rate']:.1%} / {row['goodput']:.1%}", best=None))
    gated = [row for row in rows if row["title"] == ADMISSION]
    if gated:
        parts.append(_ADMISSION.format(ttft=TTFT_OBJECTIVE))
        parts.append(_admission(gated, main))
    varied = [row for row in rows if row["title"] not in ("", ADMISSION)]
    if varied:
        parts.append("## Several routers, late events, slow and dead engines\n")
        number = facts.get("varied_requests", facts["requests"])
        where = f"{varied[0]['engines']} engines at load {varied[0]['load']:g}, {number:,} requests"
        parts.append(f"{where}; mean / p90 TTFT, goodput:\n")
        parts.append(_varied(varied))
    return "\n".join(parts)


def _admission(gated: Sequence[Row], main: Sequence[Row]) -> str:
    lines = [
        "| engines | load | refused | mean / p90 TTFT of the others | goodput | best goodput without |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(gated, key=lambda one: (one["engines"], one["load"])):
        where = (row["engines"], row["load"])
        best = max(
            (one for one in main if (one["engines"], one["load"]) == where), key=lambda one: one["goodput"]
        )
        lines.append(
            f"| {row['engines']} | {row['load']:g} | {row['refused']:.1%}"
            f" | {row['ttft_mean']:.2f} / {row['ttft_p90']:.2f}"
            f" | {row['goodput']:.1%} | {best['goodput']:.1%} ({best['policy']}) |"
        )
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], cell: Any, best: str | None) -> str:
    loads = list(dict.fromkeys(row["load"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    by = {(row["policy"], row["load"]): row for row in rows}
    lines = [
        "| policy | " + " | ".join(f"{load:g}" for load in loads) + " |",
        "|---" * (len(loads) + 1) + "|",
    ]
    for name in names:
        cells = []
        for load in loads:
            text = cell(by[name, load])
            if best and by[name, load][best] == min(by[other, load][best] for other in names):
                text = f"**{text}**"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _varied(rows: Sequence[Row]) -> str:
    titles = list(dict.fromkeys(row["title"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    by = {(row["title"], row["policy"]): row for row in rows}
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title in titles:
        least = min(by[title, name]["ttft_mean"] for name in names)
        cells = []
        for name in names:
            row = by[title, name]
            text = f"{row['ttft_mean']:.2f} / {row['ttft_p90']:.2f}, {row['goodput']:.1%}"
            cells.append(f"**{text}**" if row["ttft_mean"] == least else text)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Mean and p90 TTFT over load, one line a policy, one row of axes a fleet size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "npufleet"
    from matplotlib import pyplot

    main = [row for row in rows if not row["title"]]
    sizes = list(dict.fromkeys(row["engines"] for row in main))
    figure, axes = pyplot.subplots(len(sizes), 2, figsize=(11, 4.2 * len(sizes)), squeeze=False)
    for line, engines in enumerate(sizes):
        for column, (key, title) in enumerate((("ttft_mean", "mean TTFT"), ("ttft_p90", "p90 TTFT"))):
            axis = axes[line][column]
            for name in dict.fromkeys(row["policy"] for row in main):
                some = [row for row in main if row["engines"] == engines and row["policy"] == name]
                ours = name == "predicted-ttft"
                axis.plot(
                    [row["load"] for row in some],
                    [row[key] for row in some],
                    marker="o",
                    markersize=3,
                    linewidth=2.5 if ours else 1,
                    color="black" if ours else None,
                    label=name,
                )
            axis.set_yscale("log")
            axis.set_xlabel("load (1 = capacity without reuse-aware routing)")
            axis.set_ylabel(f"{title}, s")
            axis.set_title(f"{engines} engines")
            axis.grid(alpha=0.3)
    axes[0][1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
