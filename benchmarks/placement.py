"""Placement against the optimum, against Ray's PACK, and its time against the size of the fleet.

``make bench-placement`` runs it and writes ``docs/placement-benchmark.md``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import placement_cases as cases
from benchmarks import placement_pack as pack
from benchmarks.placement_exact import Exact
from npufleet.cluster.placement import planner
from npufleet.cluster.placement.plan import Placed, Plan, placed_as

PAGE = Path(__file__).resolve().parents[1] / "docs" / "placement-benchmark.md"
KINDS = (("a2",), ("a2-16",), ("a3",), ("a2", "a3"), ("a2", "a2-16", "a3", "310p"))
SIZES = (128, 512, 1024, 2048, 4096, 10_000)
PACKED = {"Ray PACK, as they come": False, "Ray PACK, the largest first": True}
REQUESTS = 200
RUNS = 5
HEAD = """# Placement, measured

`make bench-placement` writes this page. What cost is, and the rules that are never traded for it, is in
[Placement](placement.md); an NPU of an engine without room costs 10.
"""


def main() -> int:
    """Run all parts and print or write the page; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="fleets of each kind (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the solver on each fleet")
    parser.add_argument("--only", choices=("optimum", "pack", "times"), help="one part, printed")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    parts = (args.only,) if args.only else ("optimum", "pack", "times")
    lines = [HEAD]
    ratio = slowest = 0.0
    for line, worst in optimum(args.cases, args.seconds) if "optimum" in parts else ():
        lines.append(line)
        ratio = max(ratio, worst)
    lines += against_pack(args.cases) if "pack" in parts else []
    for line, seconds in times() if "times" in parts else ():
        lines.append(line)
        slowest = max(slowest, seconds)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write and not args.only:
        PAGE.write_text(text)
    good = ratio <= 1.05 and slowest < 1.0
    print(
        f"cost at most {ratio:.3f} of the optimum, slowest plan {slowest:.2f} s of CPU: {'good' if good else 'missed'}"
    )
    return 0 if good else 1


def ours(case: cases.Case) -> list[Placed]:
    """Place a case with the planner."""
    made = planner.plan_all(case.topology, case.free, case.wishes)
    plans = ((wish, made[wish.engine_id]) for wish in case.wishes)
    return [placed_as(wish, plan.bundles) for wish, plan in plans if isinstance(plan, Plan)]


def optimum(count: int, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the table against the solver, and the ratio of costs of each row."""
    yield "\n## Against the optimum\n", 0.0
    yield (
        (
            "Fleets of three to six servers, worn at random, with engines (pipelines, experts, prefill and decode, "
            "replicas) for 40 to 90 % of them; the optimum is OR-tools CP-SAT's.\n"
        ),
        0.0,
    )
    yield (
        "| servers | fleets | proven optima | plans at the optimum | cost, planner / optimum | worst fleet |",
        0.0,
    )
    yield "|---|---|---|---|---|---|", 0.0
    for kinds in KINDS:
        costs = []
        for seed in range(count):
            case = cases.small(seed, kinds)
            costs.append((cases.total(case, ours(case)), *Exact(case=case).solve(seconds)))
            progress(f"{' '.join(kinds)} {seed + 1}/{count}")
        sums = sum(cost for cost, _, _ in costs), sum(best for _, best, _ in costs)
        worst = max(cost / max(best, 1) for cost, best, _ in costs)
        yield (
            (
                f"| {', '.join(kinds)} | {count} | {sum(proven for _, _, proven in costs)} "
                f"| {sum(cost <= best for cost, best, _ in costs)} | {sums[0] / sums[1]:.3f} | {worst:.2f} |"
            ),
            sums[0] / sums[1],
        )


def against_pack(count: int) -> list[str]:
    """Return the table against real placement groups with PACK."""
    rows: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in ("planner", *PACKED)}
    with pack.cluster(cases.mixed(0).topology) as names:
        for seed in range(count):
            case = cases.mixed(seed)
            by_id = {wish.engine_id: wish for wish in case.wishes}
            ways = {"planner": ours(case)}
            ways |= {name: pack.place(case, names, largest_first=first) for name, first in PACKED.items()}
            for name, placed in ways.items():
                broken = sum(pack.breaks_a_rule(case, by_id[engine.engine_id], engine) for engine in placed)
                rows[name].append((len(case.wishes), len(placed), broken, cases.total(case, placed)))
            progress(f"PACK {seed + 1}/{count}")
    lines = [
        "\n## Against Ray's PACK\n",
        f"Three A2 and three A3 servers as raylets of a real Ray, {count} sets of engines for 60 to 90 % of the NPUs"
        "; ranks sorted by node, NPUs as Ray gives them out.\n",
        "| | engines asked for | placed | against a rule | cost |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(str(sum(entry[i] for entry in row)) for i in range(4))} |")
    return lines


def times() -> Iterator[tuple[str, float]]:
    """Yield the table of planning times, and the median seconds of CPU of each row.

    The planner is one thread that waits for nothing, so on a machine that does nothing else both are the same.
    """
    yield "\n## Time to plan\n", 0.0
    yield (
        (
            f"{REQUESTS} engines planned together for three quarters of the fleet, half A2, half A3; medians of {RUNS} "
            "runs in one process. The planner is one thread: on a machine that does nothing else both times are the "
            "same, and the bound of one second is held against the CPU's.\n"
        ),
        0.0,
    )
    yield "| NPUs | nodes | engines placed | seconds | seconds of CPU |", 0.0
    yield "|---|---|---|---|---|", 0.0
    for npus in SIZES:
        case = cases.large(npus, REQUESTS)
        walls, cpus = [], []
        for _ in range(RUNS):
            wall, cpu = time.perf_counter(), time.process_time()
            placed = ours(case)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        middle = statistics.median(cpus)
        yield (
            (
                f"| {case.topology.npus:,} | {len(case.topology.nodes):,} | {len(placed)} of {len(case.wishes)} "
                f"| {statistics.median(walls):.2f} | {middle:.2f} |"
            ),
            middle,
        )


def progress(text: str) -> None:
    """Say how far it is."""
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
