"""Which fleets `npufleet serve` runs on this machine: one small file each, so that `status` and `stop` find
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from . import env, local


@dataclass(frozen=True, kw_only=True)
class Run:
    """One running `npufleet serve`."""

    name: str
    pid: int
    started: float  # creation time of the process, so that a reused pid is not taken for it
    gateway: str  # URL
    router: str  # host:port
    controller: str  # URL
    folder: str = ""  # of its own Ray cluster
    ray: str = ""  # host:port of its Ray cluster, empty until that is up
    ray_auth: str = ""  # RAY_AUTH_MODE of that cluster
    engine_secret: str = field(default="", repr=False)  # for calls to engines past the router

    def alive(self) -> bool:
        """Say whether the process that wrote this still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def folder() -> Path:
    """Return where the files lie."""
    return env.home() / "run"


def record(run: Run) -> Path:
    """Write the file of a fleet and return its path.

    Raises:
        ValueError: if a fleet of that name already runs, or the folder cannot be written.
    """
    running = [other for other in all_running() if other.name == run.name and other.pid != run.pid]
    if running:
        raise ValueError(
            f"a fleet named {run.name!r} already runs here (process {running[0].pid}); "
            "stop it with `npufleet stop`, or give this one another --name"
        )
    path = folder() / f"{run.pid}.json"
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds a secret
        path.write_text(json.dumps(asdict(run)))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; set {env.HOME} to a folder that can"
        ) from error
    return path


def all_running() -> list[Run]:
    """Return the fleets whose process still runs, and remove what those left behind that were killed."""
    found = []
    for path, run in _read():
        if run.alive():
            found.append(run)
        else:
            path.unlink(missing_ok=True)
            local.remove_folder(Path(run.folder))
    return found


def find(name: str | None) -> Run:
    """Return the running fleet of that name, or the only one.

    Raises:
        ValueError: if there is none, or several and no name was given.
    """
    runs = all_running()
    if name is not None:
        runs = [run for run in runs if run.name == name]
    if not runs:
        raise ValueError(f"no fleet{f' named {name!r}' if name else ''} runs on this machine")
    if len(runs) > 1:
        raise ValueError(
            f"several fleets run here, say which with --name: {', '.join(run.name for run in runs)}"
        )
    return runs[0]


def _read() -> Iterator[tuple[Path, Run]]:
    for path in sorted(folder().glob("*.json")):
        try:
            yield path, Run(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            path.unlink(missing_ok=True)  # written by another release, or half written when its process died
