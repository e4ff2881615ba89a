"""Simulated hosts: a Ray cluster of several raylets on this machine, each with an address, NPUs and labels of its own,
and, where asked for, a network namespace of its own.

A host that is killed loses everything at once, as one whose power fails: Ray's daemons and whatever they started.
The head keeps its state in RocksDB, so one that is started again is the same cluster.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import namespaces
from npufleet.cluster.engine import orphan
from npufleet.cluster.topology import facts
from npufleet.cluster.topology.command import flags
from npufleet.cluster.topology.facts import Facts

START_S = 120.0
TRIES = 8
STARTED = b"Ray runtime started"
END_S = 30.0
CHIP = "Ascend910B3"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(kw_only=True)
class Host:
    """One host. ``npus`` 0: a host for head, router and controller."""

    name: str
    address: str
    npus: int = 0
    space: str = ""  # its network namespace, empty for that of this process
    process: subprocess.Popen[bytes] | None = None

    @property
    def family(self) -> list[psutil.Process]:
        """All processes of the host."""
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(kw_only=True)
class Hosts:
    """A head and its hosts. Use as a context: everything is gone afterwards."""

    hosts: list[Host]
    head: Host = field(default_factory=lambda: Host(name="head", address="127.0.0.9"))
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="npufleet-hosts-")))
    port: int = 0
    keep_logs: bool = False
    apart: bool = False  # each in a network namespace of its own
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Hosts:
        self.port = free_port()
        (self.folder / "token").write_text(secrets.token_hex(32))
        self.temporary.mkdir()
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_folder)
            undo.callback(_restore, {name: os.environ.get(name) for name in self.environment()})
            os.environ.update(self.environment())
            if self.apart:
                made = undo.enter_context(namespaces.network([host.name for host in self.all]))
                for host in self.all:
                    host.space, host.address = made[host.name]
            undo.callback(self.end)
            for host in self.all:
                self.start(host)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    @property
    def all(self) -> list[Host]:
        """The head and the hosts."""
        return [self.head, *self.hosts]

    @property
    def temporary(self) -> Path:
        """Where everything on the hosts keeps its temporary files."""
        return self.folder / "tmp"

    @property
    def address(self) -> str:
        """host:port of the cluster."""
        return f"{self.head.address}:{self.port}"

    def environment(self) -> dict[str, str]:
        """What processes need to use the cluster; also puts the head's state into RocksDB."""
        return {
            "TMPDIR": str(self.temporary),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self.folder / "gcs"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_worker_niceness": "0",
            # A host that is gone is noticed within some ten seconds instead of a minute.
            "RAY_health_check_period_ms": "2000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
            # While the head is away the others wait for it, longer than Ray's own minute: this machine is slow.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }

    def start(self, host: Host) -> None:
        """Start a host, or start it again, and wait until it is part of the cluster.

        Ray gives its own processes 15 to 30 s, which a busy machine can miss, so it is tried again and again.

        Raises:
            RuntimeError: if it does not start.
        """
        log = self.folder / f"{host.name}.log"
        for _ in range(TRIES):
            began = log.stat().st_size if log.exists() else 0
            host.process = self._launch(host, log)
            deadline = time.monotonic() + START_S
            while host.process.poll() is None and time.monotonic() < deadline:
                if STARTED in log.read_bytes()[began:]:
                    return
                time.sleep(0.2)
            self.kill(host)
        raise RuntimeError(f"{host.name} did not start: {log.read_text(errors='replace')[-2000:]}")

    def _launch(self, host: Host, log: Path) -> subprocess.Popen[bytes]:
        told = Facts(soc=CHIP, indices=tuple(range(host.npus)), failure_domain=host.name)
        command = [*RAY, "start", "--block", f"--node-ip-address={host.address}"]
        command += ["--object-store-memory=100000000"]
        device = {}
        if host.npus:
            command += flags(facts.node("", told, exact=True))
            device = {"NPUFLEET_DEVICE": f"virtual:{host.npus}:{CHIP},hbm=16GiB"}
        if host is self.head:  # no CPUs: nothing of the fleet goes there
            # Ray sees the other hosts' processes, which on other machines it would not, and takes the cluster whose
            # address it wrote here for one that still runs.
            (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
            command += ["--head", f"--port={self.port}", "--include-dashboard=false", "--num-cpus=0"]
            command += [f"--temp-dir={self.folder / 'ray'}"]
        else:
            command += [f"--address={self.address}", "--num-cpus=4"]
        if host.space:
            command = namespaces.inside(host.space, command)
        with log.open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **device}, start_new_session=True
            )

    def kill(self, host: Host) -> None:
        """End a host at once, and what it alone had in memory with it."""
        family = host.family
        had = mapped(family)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=END_S)
        assert host.process is not None
        host.process.wait(END_S)
        orphan.remove(had - mapped(process for other in self.all for process in other.family))

    def end(self) -> None:
        """End everything."""
        for host in reversed(self.all):
            if host.process is not None:
                self.kill(host)

    def _remove_folder(self) -> None:
        if not self.keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)

    def on_head(self, command: list[str]) -> list[str]:
        """Return ``command`` so that it runs on the head."""
        return namespaces.inside(self.head.space, command) if self.head.space else command


def mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """The shared memory that the processes have mapped."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            found.update(orphan.shared_memory(process.pid))
    return found


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
