"""Where the secret of a fleet's engines comes from, and that nobody shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npufleet.cluster import runs
from npufleet.cluster.router.lookaside.tokens import read_secret
from npufleet.cluster.secret import as_file, fleet_secret

SECRET = "a-secret-of-this-test-of-forty-characters"


def test_a_users_file_comes_before_the_made_one(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x" * 40)
    assert fleet_secret(str(file), SECRET) == b"x" * 40
    assert fleet_secret(None, SECRET) == SECRET.encode()
    assert fleet_secret(None, "") == b""
    with pytest.raises(ValueError, match="cannot be read"):
        fleet_secret(str(tmp_path / "none"), SECRET)


def test_children_read_it_and_it_goes_with_the_process() -> None:
    path = as_file(SECRET)
    assert path is not None and read_secret(path) == SECRET.encode() == read_secret(path)
    code = f"print(open({path!r}).read())"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == SECRET
    os.close(int(path.rpartition("/")[2]))
    assert not os.path.exists(path)
    assert as_file("") is None


def test_a_run_does_not_show_it(tmp_path: Path) -> None:
    run = runs.Run(name="f", pid=1, started=0.0, gateway="", router="", controller="", engine_secret=SECRET)
    assert SECRET not in repr(run)
