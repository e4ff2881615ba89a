"""``python -m benchmarks.routing TRACE``: routing quality on simulated engines, as a table, JSON and a plot.

Engines are block-level models of vLLM (``cluster/sim``) with the A3 preset; the routers are the real routing
code. The load is relative to what the engines complete when each in turn gets the next request and none is ever
idle. Everything runs under a virtual clock and is deterministic but for hash seeds, which decide nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from npufleet.cluster.bench.trace import TraceRequest, read, reuse
from npufleet.cluster.sim.fleet import FleetSpec, capacity
from npufleet.cluster.sim.timing import DEFAULT_PRESET, preset

from .report import ADMISSION, page, plot
from .study import PARTS, TTFT_OBJECTIVE, BlockPrompt, Result, policies, run, take, workload

LOADS = (0.5, 0.75, 1.0, 1.15, 1.3)
SIZES = (16, 64)
VARIED = ("round-robin", "least-load", "precise-prefix", "predicted-ttft", "dynamo-cost", "llm-d-3/2/2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to make."""

    title: str  # "" for the main table
    policy: str
    load: float
    spec: FleetSpec
    options: dict[str, Any] = field(default_factory=dict)


def cases(sizes: tuple[int, ...], loads: tuple[float, ...]) -> Iterator[Case]:
    """The main table with its routers that refuse, then the variations on the smaller fleet at 0.9 of its capacity."""
    for load in loads:
        for engines in sizes:
            spec = FleetSpec(engines=engines, device=preset(DEFAULT_PRESET))
            for name in policies():
                yield Case(title="", policy=name, load=load, spec=spec)
            gated = replace(spec, ttft_objective=TTFT_OBJECTIVE)
            yield Case(title=ADMISSION, policy="predicted-ttft", load=load, spec=gated)
    base = FleetSpec(engines=sizes[0], device=preset(DEFAULT_PRESET))
    slow = tuple(range(max(1, round(0.05 * sizes[0]))))
    varied = {
        "1 router": base,
        "4 routers": replace(base, routers=4),
        "16 routers": replace(base, routers=16),
        "event lag 2 s": replace(base, event_lag=2.0),
        "16 routers, event lag 2 s": replace(base, routers=16, event_lag=2.0),
        f"{len(slow)} of {sizes[0]} engines 3 times as slow": replace(base, slow=slow),
        "an engine killed at a third, back after 60 s": base,  # the time is known with the workload
    }
    for title, spec in varied.items():
        for name in VARIED:
            yield Case(title=title, policy=name, load=0.9, spec=spec)


_trace: list[TraceRequest] = []
_prompts: list[BlockPrompt] = []


def _load(path: Path, part: str, limit: int | None) -> None:
    _trace[:] = take(read(path), part)[:limit]
    _prompts[:] = [BlockPrompt(one) for one in _trace]


def _run(case: Case, rate: float) -> tuple[Case, Result]:
    arrivals = workload(_trace, _prompts, rate * case.load)
    spec = case.spec
    if case.title.startswith("an engine killed"):
        at = arrivals[-1].at / 3
        spec = replace(spec, kill=(0, at, at + 60))
    return case, run(spec, case.policy, policies()[case.policy], arrivals, case.load)


def main() -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument(
        "trace", type=Path, help="a trace with hash_ids, such as Mooncake's conversation trace"
    )
    parser.add_argument("--part", choices=PARTS, default="second", help="(default %(default)s)")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--engines", type=int, nargs="+", default=SIZES)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--write", type=Path, help="write routing-benchmark.md and .svg into this folder")
    parser.add_argument(
        "--no-varied",
        dest="varied",
        action="store_false",
        help="only the main table: no lags, faults, routers",
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    _load(args.trace, args.part, args.requests)
    print(
        f"{len(_trace)} requests, {reuse(_trace):.1%} of their blocks reused; capacity of",
        end=" ",
        flush=True,
    )
    rates: dict[int, float] = {}
    for engines in args.engines:
        spec = FleetSpec(engines=engines, device=preset(DEFAULT_PRESET))
        rates[engines] = capacity(spec, workload(_trace, _prompts, 1.0))
        print(f"{engines} engines {rates[engines]:.2f} requests/s;", end=" ", flush=True)
    print()
    todo = [case for case in cases(tuple(args.engines), tuple(args.loads)) if args.varied or not case.title]
    rows: list[dict[str, Any]] = []
    facts = {
        "requests": len(_trace),
        "reuse": reuse(_trace),
        "capacity": rates,
        "trace": args.trace.name,
        "part": args.part,
    }
    begun = time.monotonic()
    with ProcessPoolExecutor(
        args.jobs, initializer=_load, initargs=(args.trace, args.part, args.requests)
    ) as pool:
        jobs = [pool.submit(_run, case, rates[case.spec.engines]) for case in todo]
        for number, job in enumerate(jobs, 1):
            case, result = job.result()
            rows.append({"title": case.title, **result.as_dict()})
            if args.json:  # what is there counts, should the rest never come
                args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
            print(
                f"[{number}/{len(todo)} {time.monotonic() - begun:4.0f} s] {case.spec.engines} engines, load"
                f" {case.load:g}"
                f" {case.title:42s} {case.policy:18s} TTFT mean {result.ttft_mean:7.2f} p90 {result.ttft_p90:7.2f}"
                f" s, hits {result.hit_rate:.1%}, goodput {result.goodput:.1%}",
                flush=True,
            )
    if args.write:
        (args.write / "routing-benchmark.md").write_text(page(facts, rows))
        plot(rows, args.write / "routing-benchmark.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
