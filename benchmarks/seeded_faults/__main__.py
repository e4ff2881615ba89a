"""Put faults into plugin and kernels, one at a time, and see which the test suite catches.

    python benchmarks/seeded_faults                  all of them (minutes)
    python benchmarks/seeded_faults --only rope      those whose name holds a text
    python benchmarks/seeded_faults --write docs/seeded-faults.md

A fault is a change of source text (see catalogue.py). It is made in a copy that goes before the installed package,
and the tests named with it run until one fails. First the same tests have to pass without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalogue import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("kernels", "plugin", "cluster")
SECONDS = 400.0  # for the tests of one target; a hang counts as caught, and is named


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault; ``caught`` is the end of the first failing test's name, None if none failed."""

    fault: Fault
    caught: str | None
    seconds: float


def copy(folder: Path, fault: Fault | None) -> None:
    """Make ``folder``/npufleet, with the fault in it.

    Raises:
        ValueError: the text that the fault replaces is not there exactly once.
    """
    package = folder / "npufleet"
    shutil.rmtree(package, ignore_errors=True)
    for library in LIBRARIES:
        shutil.copytree(ROOT / library, package / library, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    if fault is None:
        return
    path = package / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} holds the text {text.count(fault.old)} times, not once")
    path.write_text(text.replace(fault.old, fault.new))


def run(folder: Path, target: str) -> str | None:
    """Run one target; None if it passes, otherwise what failed first."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *target.split(),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"{target}: no end within {SECONDS:.0f} s"
    if process.returncode == 0:
        return None
    # pytest's own summary only: an engine's log has lines that begin with ERROR too
    failed = [line for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"{target}: {output.strip()[-200:]}"


def check(folder: Path, fault: Fault | None, targets: Sequence[str]) -> tuple[str | None, float]:
    """Run the targets in order until one fails: what failed, and the seconds that it took."""
    began = time.monotonic()
    copy(folder, fault)
    for target in targets:
        if (failed := run(folder, target)) is not None:
            return failed, time.monotonic() - began
    return None, time.monotonic() - began


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The result in Markdown."""
    caught = sum(outcome.caught is not None for outcome in outcomes)
    lines = [
        f"{caught} of {len(outcomes)} faults are caught.",
        "",
        "| fault | file | first test that fails |",
        "|---|---|---|",
    ]
    for outcome in outcomes:
        seen = f"`{outcome.caught}`" if outcome.caught else f"**none.** {outcome.fault.why_not}"
        lines.append(f"| {outcome.fault.name} | `{outcome.fault.file}` | {seen} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if every fault was caught or has a reason why it cannot be."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="faults whose name holds this text")
    made.add_argument(
        "--skip-control", action="store_true", help="do not run the tests without a fault first"
    )
    made.add_argument(
        "--write", type=Path, help="write the table into this file, behind its first heading's text"
    )
    args = made.parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in fault.name]
    targets = list(dict.fromkeys(target for fault in faults for target in fault.tests))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="npufleet-faults-") as name:
        folder = Path(name)
        if not args.skip_control:
            failed, seconds = check(folder, None, targets)
            print(f"{seconds:6.0f} s  without a fault: {failed or 'all tests pass'}", flush=True)
            if failed:
                return 1
        for fault in faults:
            caught, seconds = check(folder, fault, fault.tests)
            outcomes.append(Outcome(fault=fault, caught=caught, seconds=seconds))
            print(f"{seconds:6.0f} s  {fault.name}: {caught or 'NOT CAUGHT'}", flush=True)
    text = table(outcomes)
    print("\n".join(text))
    if args.write:
        head = args.write.read_text().split("\n## Result\n")[0]
        args.write.write_text(f"{head}\n## Result\n\n" + "\n".join(text) + "\n")
    return int(any(outcome.caught is None and not outcome.fault.why_not for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
