"""A Ray cluster of one node for `npufleet serve`: on loopback, in a folder of its own, gone without a trace
after.

Ray's processes share the fate of the process that starts them, so even a killed `npufleet serve` leaves none.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from .device import Device
from .topology import facts, labels
from .topology.model import Node
from .topology.sources import here

OBJECT_STORE_BYTES = 100 << 20  # no tokens or weights travel through Ray
_END_S = 10.0
_PREFIX = "npufleet-"
AUTH_MODE = "RAY_AUTH_MODE"  # Ray sets it to "token" when it starts a cluster and nobody has set it
_AUTO_CONNECT = "RAY_ENABLE_AUTO_CONNECT"

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for "this machine only": every port on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would let anything else on the machine go before the engines
}


class RayNotStarted(RuntimeError):
    """Ray did not come up; the text says why."""


@dataclass(frozen=True, kw_only=True)
class LocalRay:
    """The cluster that this process started."""

    folder: Path
    address: str

    @property
    def logs(self) -> Path:
        """Where Ray and Serve write their logs."""
        return self.folder / "session_latest" / "logs"

    def stop(self, keep_logs: bool = False) -> list[str]:
        """End the cluster and return what had to be killed because it did not end by itself (nothing,
        normally).
        """
        stubborn = _end_family()
        if not keep_logs:
            remove_folder(self.folder)
        return stubborn


def make_folder() -> Path:
    """Return a new folder for a cluster. Its path is short: Ray's sockets lie in it, named in 107 bytes."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def remove_folder(folder: Path) -> None:
    """Remove a folder that :func:`make_folder` made, and no other."""
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def start(device: Device, folder: Path) -> LocalRay:
    """Start Ray on this machine with the NPUs of ``device``, its files in ``folder``, and connect to it.

    Ray gives its own processes 30 s, which a busy machine can miss, so it is tried twice.

    Raises:
        RayNotStarted: if Ray does not start; none of its processes is left.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _import_ray()
    import ray

    # Ray looks for the chip's name through CANN and logs a traceback where there is none; the label below
    # says it.
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)
    failure = _try(device, folder) and _try(device, folder)
    if failure:
        raise RayNotStarted(f"Ray did not start on this machine: {failure}")
    return LocalRay(folder=folder, address=ray.get_runtime_context().gcs_address)


def _import_ray() -> None:
    """Import Ray so that no call in this process starts a second one, as a stop that is overtaken would.

    Ray reads this when it is imported; its own processes, which inherit the environment, are left as they are.
    """
    before = os.environ.get(_AUTO_CONNECT)
    os.environ[_AUTO_CONNECT] = "0"
    try:
        importlib.import_module("ray")
    finally:
        del os.environ[_AUTO_CONNECT]
        if before is not None:
            os.environ[_AUTO_CONNECT] = before


def _try(device: Device, folder: Path) -> str:
    """Start Ray once; return why it did not start, empty if it did."""
    try:
        _init(device, folder)
    except Exception as error:  # noqa: BLE001 - Ray raises bare Exception when a process of its own is late
        _end_family()
        return str(error) or type(error).__name__
    return ""


def _init(device: Device, folder: Path) -> None:
    import ray

    node = this_node(device)
    ray.init(
        address="local",
        resources={name: float(count) for name, count in labels.resources(node).items()},
        labels=labels.to_labels(node),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )


def this_node(device: Device) -> Node:
    """Return this machine as a node with the NPUs of ``device``, wired as its tools say."""
    told = facts.merge(facts.Facts(soc=device.chip or None), here(virtual=device.kind == "virtual"))
    return facts.node(
        "", told if told.indices else replace(told, indices=tuple(range(device.count))), exact=True
    )


def _end_family() -> list[str]:
    """Shut Ray down and return what of our children had to be killed because it did not end by itself."""
    import ray

    family = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(family, timeout=_END_S)
    stubborn = [_title(process) for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_END_S)
    return stubborn


def _title(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def wait_gone(pid: int, timeout: float) -> bool:
    """Wait until process ``pid`` has ended; say whether it has."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False
