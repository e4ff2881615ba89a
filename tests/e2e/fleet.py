"""A fleet as a user starts it (`npufleet serve`, a process of its own), and what tests see of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 540.0  # deadlines, not expectations: a loaded machine is slow
RECOVER_S = 420.0
STOP_S = 120.0
MODEL = "SmolLM2-135M-Instruct"

PLAIN = False
"""For httpx's ``verify`` where no TLS is: it would read all certificates of the machine for each request."""

ENGINE = "ServeReplica:npufleet:Engine"
ROUTER = "ServeReplica:npufleet:Router"
CONTROLLER = "ServeReplica:npufleet:Controller"
SERVE = "ray::ServeController"
CORE = "EngineCore"
WORKER = "RayWorkerProc"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def eventually(what: str, seconds: float, check: Callable[[], Any]) -> Any:
    """Return the first true value of ``check``; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(0.25)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@dataclass(kw_only=True)
class Fleet:
    """A running `npufleet serve`, of the demo model unless told otherwise."""

    log: Path
    target: str = "demo"
    engines: int = 2
    arguments: tuple[str, ...] = ()
    device: str = ""  # virtual NPUs to present; as in the environment of the tests if empty
    name: str = field(default_factory=lambda: f"e2e-{os.getpid()}")
    http: int = field(default_factory=free_port)
    grpc: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The gateway."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def router(self) -> str:
        """host:port of the gRPC router."""
        return f"127.0.0.1:{self.grpc}"

    def start(self) -> None:
        """Start it and wait until the gateway says that it can answer."""
        self.launch()
        assert self.process is not None
        eventually(
            f"the fleet is up\n{self.said()}", START_S, lambda: self._exited() or self.ready() == self.engines
        )
        assert self.process.poll() is None, f"`npufleet serve` ended early:\n{self.said()}"

    def launch(self) -> None:
        """Start it."""
        arguments = ["serve", self.target, "--name", self.name, "--port", str(self.http)]
        arguments += ["--grpc-port", str(self.grpc), "--metrics-port", str(self.metrics), *self.arguments]
        environment = {**os.environ, **({"NPUFLEET_DEVICE": self.device} if self.device else {})}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "npufleet.cluster.cli", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C in pytest must not reach it: the fixture stops it
            )

    def _exited(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def said(self) -> str:
        """What the command has printed so far."""
        return self.log.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """What the controller says."""
        answer: dict[str, Any] = httpx.get(
            f"http://127.0.0.1:{self.metrics}/status", timeout=10, verify=PLAIN
        ).json()
        return answer

    def ready(self) -> int:
        """How many engines the gateway can use; 0 while it does not answer."""
        try:
            if httpx.get(f"{self.url}/health", timeout=10, verify=PLAIN).status_code != 200:
                return 0
            text = httpx.get(f"{self.url}/metrics", timeout=10, verify=PLAIN).text
        except httpx.HTTPError:
            return 0
        lines = [line for line in text.splitlines() if line.startswith("npufleet_gateway_engines{")]
        return int(float(lines[0].rsplit(" ", 1)[1])) if lines else 0

    def whole(self) -> None:
        """Wait until all engines can be used."""
        eventually(f"all engines are back\n{self.said()}", RECOVER_S, lambda: self.ready() == self.engines)

    def processes(self, title: str | None = None) -> list[psutil.Process]:
        """Its processes, all or those with ``title`` in their command line."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if title is None or title in _title(process)]

    def stop(self) -> int:
        """Ask it to stop as Ctrl-C does and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=STOP_S)

    def kill(self) -> None:
        """End it whatever state it is in, with all that it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            family = self.processes()
            self.process.kill()
            self.process.wait()
            for process in family:
                if process.is_running():
                    process.kill()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill(process: psutil.Process) -> None:
    """kill -9, and see it gone."""
    process.kill()
    eventually(f"process {process.pid} is gone", 30.0, lambda: gone(process))


def sockets(processes: Iterable[psutil.Process]) -> set[Path]:
    """The unix sockets in the file system that the processes have bound."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {Path(entry.laddr) for entry in process.net_connections("unix") if entry.laddr}
    return {path for path in found if path.exists()}


def gone(process: psutil.Process) -> bool:
    """Whether a process no longer runs (a zombie does not)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
