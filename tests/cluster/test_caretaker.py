"""A killed fleet leaves nothing: what it told its caretaker is removed. One that ends well keeps what it has."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from npufleet.cluster import local
from npufleet.cluster.caretaker import Caretaker

FLEET = """
import subprocess, sys, time
from pathlib import Path
import psutil
from npufleet.cluster.caretaker import Caretaker

record, folder, shared, end = sys.argv[1:]
caretaker = Caretaker.start(Path(record), Path(folder))
assert not psutil.Process().children(), "the caretaker is no child"
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
caretaker.tell(psutil.Process().children(), {shared})
if end == "well":
    caretaker.dismiss()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["badly", "well"])
def test_what_a_killed_fleet_leaves(tmp_path: Path, end: str) -> None:
    record, shared, folder = tmp_path / "1.json", tmp_path / "shared", local.make_folder()
    for path in (record, shared, folder / "log"):
        path.write_text("")
    arguments = [str(record), str(folder), str(shared), end]
    with subprocess.Popen(
        [sys.executable, "-c", FLEET, *arguments], stdout=subprocess.PIPE, text=True
    ) as fleet:
        assert fleet.stdout is not None
        child = psutil.Process(int(fleet.stdout.readline()))
        fleet.kill()
    if end == "badly":
        deadline = time.monotonic() + 60
        while record.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert [path for path in (record, shared, folder) if path.exists()] == []
    else:
        time.sleep(1.0)  # nothing is to come that could be waited for
        assert child.is_running()
        assert all(path.exists() for path in (record, shared, folder))
        child.kill()
        local.remove_folder(folder)


def test_a_dead_caretaker_hurts_nobody(tmp_path: Path) -> None:
    made = Caretaker.start(tmp_path / "record", tmp_path)
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.stdin = open("/dev/full", "w")  # noqa: SIM115 - closed by dismiss
    made.tell([], set())
    made.dismiss()
