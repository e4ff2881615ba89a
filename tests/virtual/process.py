"""Runs Python text in a fresh process and gives back what it printed."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run(code: str, *, python: str | Path = sys.executable, timeout: int = 300, **env: str | None) -> str:
    """Standard output of ``python -c code``; None removes a variable. A failure raises with its stderr."""
    done = attempt(code, python=python, timeout=timeout, **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def attempt(code: str, *, python: str | Path = sys.executable, timeout: int = 300, **env: str | None):
    """The finished process of ``python -c code``, whatever its exit status."""
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    clean = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.run(
        [str(python), "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean,
        check=False,
        cwd="/",
    )


def report(code: str, **env: str | None):
    """The JSON value that the code's last line prints."""
    return json.loads(run(code, **env).splitlines()[-1])
