"""``npufleet bench replay``: replay a request trace against a router, a gateway or an engine."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .. import checks
from .replay import Objectives, Plan, Report, replay, sum_up
from .target import Outcome, target
from .trace import read, reuse

_EPILOG = """\
traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids, as Mooncake publishes them, or
CSV with TIMESTAMP, ContextTokens and GeneratedTokens, as Azure does.

examples:
  npufleet bench replay conversation_trace.jsonl --url grpc://127.0.0.1:50051 --time-scale 2 --plot out.svg
  npufleet bench replay code.csv --url http://127.0.0.1:8000 --requests 500 --length-scale 0.1
"""

PLOTS = (".svg", ".png", ".pdf")


def add_arguments(commands: Any) -> None:
    """Add the command to the command line."""
    bench = commands.add_parser("bench", help="measure a running fleet")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    made = kinds.add_parser(
        "replay",
        help="replay a request trace",
        description="Send a trace's requests at its own times and report latencies, goodput and cache hits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("trace", type=Path, help="the trace file")
    made.add_argument(
        "--url", required=True, help="grpc://HOST:PORT (VllmEngine) or http://HOST:PORT (OpenAI)"
    )
    made.add_argument("--model", default="", help="the model to ask for, where there are several")
    made.add_argument("--time-scale", type=float, default=1.0, help="2 = twice as fast (default %(default)s)")
    made.add_argument(
        "--length-scale", type=float, default=1.0, help="0.1 = a tenth of all tokens (default %(default)s)"
    )
    made.add_argument("--requests", type=int, help="only the first so many")
    made.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one answer (default %(default)s)"
    )
    made.add_argument("--ttft", type=float, default=2.0, help="objective, seconds (default %(default)s)")
    made.add_argument("--tpot", type=float, default=0.1, help="objective, seconds (default %(default)s)")
    made.add_argument("--json", type=Path, help="write the report and every request to this file")
    made.add_argument("--plot", type=Path, help="write a picture (.svg, .png, .pdf); needs npufleet[bench]")
    made.add_argument("--quiet", action="store_true", help="no progress")


def check(args: argparse.Namespace) -> None:
    """See that the replay can be made and written down, before it takes its time. ValueError for what cannot."""
    if args.requests is not None:
        checks.integer(args.requests, "--requests", 1, 1 << 40)
    for name in ("timeout", "ttft", "tpot"):
        if not checks.number(getattr(args, name), f"--{name}", 0.0, 1e9) > 0.0:
            raise ValueError(f"--{name} must be above 0 s")
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            raise ValueError(f"--{name} {file}: no file can be written there")
    if args.plot is not None:
        if args.plot.suffix not in PLOTS:
            raise ValueError(f"--plot {args.plot}: its name must end with one of {', '.join(PLOTS)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'npufleet[bench]'")


def run(args: argparse.Namespace) -> int:
    """Replay; 1 where requests failed."""
    check(args)
    plan = Plan(
        time_scale=args.time_scale, length_scale=args.length_scale, limit=args.requests, drain=args.timeout
    )
    trace = read(args.trace)
    shown = trace[: plan.limit]
    print(
        f"{len(shown)} requests over {shown[-1].at / plan.time_scale:.0f} s, "
        f"{reuse(shown):.1%} of their prompt blocks seen before"
    )
    objectives = Objectives(ttft=args.ttft, tpot=args.tpot)
    try:
        outcomes = asyncio.run(_replay(args, trace, plan))
    except OSError as error:
        print(f"npufleet: error: {error}", file=sys.stderr)
        return 2
    report = sum_up(outcomes, objectives)
    print(render(report, objectives))
    if args.json:
        args.json.write_text(json.dumps({"report": report.as_dict(), "requests": _rows(outcomes)}) + "\n")
    if args.plot:
        from .plot import plot

        plot(outcomes, objectives, args.plot)
    return 1 if report.failed else 0


async def _replay(args: argparse.Namespace, trace: Any, plan: Plan) -> list[Outcome]:
    to = target(args.url, args.model, args.timeout)
    try:
        await to.open()
        return await replay(trace, to, plan, None if args.quiet else _Line())
    finally:
        await to.close()


class _Line:
    """One line of progress, twice a second."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, sent: int, ended: int, failed: int, all_of_them: int) -> None:
        now = time.monotonic()
        if now - self._told < 0.5 and ended + failed < all_of_them:
            return
        self._told = now
        ending = "\n" if ended + failed == all_of_them else ""
        line = f"\r{sent}/{all_of_them} sent, {ended} answered, {failed} failed"
        print(line, end=ending, file=sys.stderr, flush=True)


def render(report: Report, objectives: Objectives) -> str:
    """The report as text."""
    lines = [
        f"requests            {report.requests}, failed {report.failed}, in {report.seconds:.1f} s",
        f"time to first token mean {report.ttft_mean:.3f}  p50 {report.ttft_p50:.3f}  p90 {report.ttft_p90:.3f}"
        f"  p99 {report.ttft_p99:.3f} s",
        f"time per token      p50 {report.tpot_p50 * 1000:.1f}  p90 {report.tpot_p90 * 1000:.1f} ms",
        f"output              {report.output_tokens_per_second:.0f} tokens/s",
        f"prefix cache        {report.hit_rate:.1%} of prompt tokens",
        f"goodput             {report.goodput:.2f} requests/s, {report.good:.1%} of all"
        f" (first token within {objectives.ttft:g} s, then {objectives.tpot * 1000:g} ms a token)",
    ]
    if report.late_p99 > 0.05:
        lines.append(
            f"warning: requests were sent up to {report.late_p99:.2f} s (p99) late; this client is too slow"
        )
    lines += [f"error               {count} x {kind}" for kind, count in sorted(report.errors.items())]
    return "\n".join(lines)


def _rows(outcomes: list[Outcome]) -> list[dict[str, object]]:
    begun = min(one.due for one in outcomes)
    return [
        {
            "due": one.due - begun,
            "ttft": one.ttft if one.first >= 0 else None,
            "tpot": one.tpot if one.end >= 0 else None,
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "output_tokens": one.output_tokens,
            "error": one.error,
        }
        for one in outcomes
    ]
