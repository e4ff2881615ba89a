"""Put faults into plugin and kernels, one at a time, and see which the test suite catches.

    python benchmarks/seeded_faults                  all of them (minutes)
    python benchmarks/seeded_faults --only rope      those whose name holds a text; may be given several times
    python benchmarks/seeded_faults --write docs/seeded-faults.md

With ``--only`` and ``--write`` the page keeps its lines of the faults that did not run.

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
NONE = "**none.**"
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


def row(outcome: Outcome) -> str:
    """A fault's line of the table."""
    seen = f"`{outcome.caught}`" if outcome.caught else f"{NONE} {outcome.fault.why_not}"
    return f"| {outcome.fault.name} | `{outcome.fault.file}` | {seen} |"


def kept(page: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Fault → its line, for the catalogue's faults that ran now or have a line in ``page``."""
    ran = {outcome.fault.name: row(outcome) for outcome in outcomes}
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines()}
    known = {fault.name: ran.get(fault.name) or lines.get(fault.name) for fault in FAULTS}
    return {name: line for name, line in known.items() if line}


def table(rows: Sequence[str]) -> str:
    """The result in Markdown."""
    caught = sum(NONE not in line for line in rows)
    head = [f"{caught} of {len(rows)} faults are caught.", ""]
    return "\n".join([*head, "| fault | file | first test that fails |", "|---|---|---|", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if every fault was caught or has a reason why it cannot be."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--only", action="append", default=[], help="faults whose name holds this text; may be repeated"
    )
    made.add_argument(
        "--skip-control", action="store_true", help="do not run the tests without a fault first"
    )
    made.add_argument(
        "--write", type=Path, help="write the table into this file, behind its first heading's text"
    )
    args = made.parse_args(argv)
    faults = [fault for fault in FAULTS if not args.only or any(text in fault.name for text in args.only)]
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
    print(table([row(outcome) for outcome in outcomes]))
    if args.write:
        page = args.write.read_text()
        rows = kept(page if args.only else "", outcomes)
        head = page.split("\n## Result\n")[0]
        args.write.write_text(f"{head}\n## Result\n\n{table(list(rows.values()))}\n")
    return int(any(outcome.caught is None and not outcome.fault.why_not for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
