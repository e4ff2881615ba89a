"""Measure routers side by side: ``python -m benchmarks.router --rounds 5``.

Two mock engines and each router run in processes of their own. Each load goes through every path in turns, round
after round; medians are printed. CPU is user and system time of the router's process tree. "added" is the
difference to the direct way of the same client protocol, in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from benchmarks.router.clients import Load, Seen, over_grpc, over_http
from benchmarks.router.paths import LOGS, ROOT, WAYS, Engine, Way, start
from tests.fakes.tokenizer import make_tokenizer_dir

LOADS = (
    Load(name="64 paced streams of 64 tokens", calls=128, streams=64, tokens=64, spread=0.64),
    Load(name="one short call at a time", calls=150, streams=1, tokens=1),
    Load(name="short calls, 16 at once", calls=480, streams=16, tokens=1),
)

READY_SECONDS = 120


@dataclass
class Running:
    """One path under measurement."""

    path: Way
    address: str
    process: subprocess.Popen[bytes] | None
    cpu_us: list[float] = field(default_factory=list)  # per call, one entry per round
    rate: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """User and system time of the process tree so far."""
        if self.process is None:
            return 0.0
        root = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    async def run(self, load: Load) -> Seen:
        """Put ``load`` on it."""
        drive = over_grpc if self.path.speaks == "grpc" else over_http
        return await drive(self.address, load)


async def measure(ways: Sequence[Running], load: Load, rounds: int) -> None:
    """Fill the numbers of ``ways`` for ``load``."""
    for one in ways:
        one.cpu_us, one.rate, one.p50, one.p99 = [], [], [], []
    for number in range(rounds):
        for one in ways:
            before = one.cpu_seconds()
            seen = await one.run(load)
            one.cpu_us.append((one.cpu_seconds() - before) / load.calls * 1e6)
            one.rate.append(load.calls / seen.seconds)
            ordered = sorted(seen.first_ms)
            one.p50.append(statistics.median(ordered))
            one.p99.append(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))])
        print(f"{load.name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def table(ways: Sequence[Running], load: Load) -> str:
    """The medians of ``ways`` for ``load``, as Markdown."""
    direct = {one.path.speaks: one for one in ways if one.process is None}
    smg = next((statistics.median(o.cpu_us) for o in ways if o.path.name.startswith("smg")), None)
    lines = [
        f"{load.name}:\n",
        "| path | client | CPU us/call | CPU us/token | of smg's | first token p50 / p99 ms "
        "| added p50 / p99 ms | calls/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in ways:
        cpu, base = statistics.median(one.cpu_us), direct[one.path.speaks]
        added50 = statistics.median(a - b for a, b in zip(one.p50, base.p50, strict=True))
        added99 = statistics.median(a - b for a, b in zip(one.p99, base.p99, strict=True))
        has_cpu = one.process is not None
        lines.append(
            f"| {one.path.name} | {one.path.speaks} | {f'{cpu:.0f}' if has_cpu else '-'} "
            f"| {f'{cpu / load.tokens:.1f}' if has_cpu else '-'} "
            f"| {f'{cpu / smg:.2f}' if has_cpu and smg else '-'} "
            f"| {statistics.median(one.p50):.2f} / {statistics.median(one.p99):.2f} "
            f"| {f'{added50:+.2f} / {added99:+.2f}' if has_cpu else '-'} | {statistics.median(one.rate):.0f} |"
        )
    return "\n".join(lines)


async def until_ready(one: Running) -> None:
    """Wait until a first call through ``one`` succeeds."""
    give_up = time.monotonic() + READY_SECONDS
    while True:
        try:
            async with asyncio.timeout(10):
                await one.run(Load(name="warm-up", calls=8, streams=4, tokens=2))
            return
        except Exception as error:  # supervisor: whatever another's router does while it comes up
            dead = one.process is not None and one.process.poll() is not None
            if dead or time.monotonic() > give_up:
                raise RuntimeError(f"{one.path.name} does not work: {error!r}; see {LOGS}") from error
            await asyncio.sleep(0.5)


async def compare(ways: Sequence[Running], rounds: int) -> None:
    """Measure and print everything."""
    for one in ways:
        await until_ready(one)
        print(f"{one.path.name} is ready", file=sys.stderr, flush=True)
    for load in LOADS:
        await measure(ways, load, rounds)
        print(table(ways, load) + "\n", flush=True)


def start_engine(tokenizer: Path, core: Path) -> tuple[subprocess.Popen[str], Engine]:
    """A mock engine; the sockets of its core come into ``core``."""
    core.mkdir()
    command = [sys.executable, "-m", "benchmarks.router.mock_engine", str(tokenizer), str(core)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    over_grpc_address, http_address = process.stdout.readline().split()
    return process, Engine(grpc=over_grpc_address, http=http_address, core=str(core))


def main() -> None:
    """Start engines and routers, measure, stop them."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="paths whose names begin so")
    args = made.parse_args()
    chosen = [p for p in WAYS if not args.only or not p.command or p.name.startswith(tuple(args.only))]
    processes: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="npufleet-bench-") as folder:
        tokenizer = make_tokenizer_dir(Path(folder) / "tokenizer")
        config = json.loads((tokenizer / "config.json").read_text())
        (tokenizer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        try:
            engines = []
            for number in range(2):
                process, engine = start_engine(tokenizer, Path(folder) / f"core{number}")
                processes.append(process)
                engines.append(engine)
            ways = []
            for path in chosen:
                router, address = start(path, engines, tokenizer)
                if router is not None:
                    processes.append(router)
                ways.append(Running(path, address, router))
            uvloop.run(compare(ways, args.rounds))
        finally:
            for each in processes:
                each.terminate()
            for each in processes:
                try:
                    each.wait(10)
                except subprocess.TimeoutExpired:
                    each.kill()


if __name__ == "__main__":
    main()
