"""Ray's own processes under a fleet: noticed when they end, and nothing of them left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npufleet.cluster.lifeline import Lifeline


@pytest.fixture
def head(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that has the name of Ray's head service."""
    program = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "gcs_server")
    with subprocess.Popen([program, "600"]) as process:
        yield process
        process.kill()


def test_a_dead_child_of_ray_is_named(head: subprocess.Popen[bytes]) -> None:
    lifeline = Lifeline.of_children()
    assert head.pid in [process.pid for _, process in lifeline.processes]
    assert lifeline.lost() is None
    os.kill(head.pid, signal.SIGKILL)
    os.waitid(os.P_PID, head.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie as Ray's children are
    assert lifeline.lost() == "gcs_server"
    head.wait()
    assert lifeline.lost() == "gcs_server"


def test_other_children_are_no_lifeline() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        lifeline = Lifeline.of_children()
        process.kill()
    assert lifeline.lost() is None


FAMILY = """  # a process of its own: all of its children are meant
import os, psutil, subprocess, sys, time
from npufleet.cluster.lifeline import _ended, end_children

loud = subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, text=True)
path = "/dev/shm/" + loud.stdout.readline().strip()
assert os.path.exists(path)
subprocess.Popen(["sh", "-c", "sleep 600; true"])
while not any(process.name() == "sleep" for process in psutil.Process().children(recursive=True)):
    time.sleep(0.05)
family = psutil.Process().children(recursive=True)
end_children(0.1)
print([process.pid for process in family if not _ended(process)], os.path.exists(path))
"""

SHARED = """
import time
from multiprocessing import shared_memory, resource_tracker

made = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(made._name, "shared_memory")  # nobody else is to remove it
print(made.name, flush=True)
time.sleep(600)
"""


def test_children_are_killed_and_all_that_was_theirs(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    code = [sys.executable, "-c", FAMILY, str(tmp_path / "shared.py")]
    out = subprocess.run(code, capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.split() == ["[]", "False"]


IMPORT = """
import os, sys
from npufleet.cluster import local

assert "ray" not in sys.modules
local._import_ray()
from ray._private import auto_init_hook

print(auto_init_hook.enable_auto_connect, "RAY_ENABLE_AUTO_CONNECT" in os.environ)
"""


def test_no_call_starts_a_second_ray() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", IMPORT]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert out.stdout.split() == ["False", "False"]  # not here, and nothing for its children to inherit
