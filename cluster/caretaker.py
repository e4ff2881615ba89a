"""What cleans up after a `npufleet serve` that was killed and could not do it itself.

Ray's processes end when the process that started them is gone, each in its own way and some only after a minute;
none of them knows of the shared memory that an engine's processes leave behind, or of our files. So a small
process of its own, in its own session, reads on a pipe what there is, and acts when the pipe ends without a
farewell.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from . import local
from .engine import orphan, sockets

GRACE_S = 3.0  # for the fleet's processes to end by themselves

# Forks before it imports anything: the caretaker must not be a child of the fleet, whose children all end with it.
_PROGRAM = f"""
import os
os.fork() and os._exit(0)
os.setsid()
from {__name__} import main
main()
"""


@dataclass(kw_only=True)
class Caretaker:
    """The fleet's end of the pipe."""

    process: subprocess.Popen[str]
    _told: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, record: Path, folder: Path) -> Caretaker:
        """Start one for the fleet whose run is written in ``record`` and whose Ray lives in ``folder``."""
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            text=True,
        )
        process.wait()
        made = cls(process=process)
        made._say(record=str(record), folder=str(folder))
        return made

    def tell(self, family: Iterable[psutil.Process], shared: Iterable[str]) -> None:
        """Say which processes and which shared memory the fleet has now."""
        alive = [(process.pid, process.create_time()) for process in family if process.is_running()]
        self._say(family=alive, shared=sorted(shared))

    def dismiss(self) -> None:
        """Say that there is nothing left to care for."""
        self._say(done=True)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _say(self, **news: Any) -> None:
        self._told |= news
        assert self.process.stdin is not None
        with contextlib.suppress(
            OSError
        ):  # it was killed, and so nobody cares; the next start tidies up files
            print(json.dumps(self._told), file=self.process.stdin, flush=True)


def main() -> None:
    """Read what the fleet says until the pipe ends, then remove what it left."""
    told: dict[str, Any] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # cut off by a kill in the middle
            told = json.loads(line)
    if told and not told.get("done"):
        clean_up(told)


def clean_up(told: dict[str, Any]) -> None:
    """End the processes, remove the shared memory, the folder and the record that a dead fleet told of."""
    family = [process for pid, began in told.get("family", ()) if (process := _find(pid, began))]
    _, alive = psutil.wait_procs(family, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    orphan.remove(told.get("shared", ()))
    sockets.tidy()
    local.remove_folder(Path(told["folder"]))
    Path(told["record"]).unlink(missing_ok=True)


def _find(pid: int, began: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if process.create_time() == began else None
    except psutil.Error:
        return None
