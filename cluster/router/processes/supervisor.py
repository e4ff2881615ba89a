"""Start, feed, watch and end router processes that share one port (SO_REUSEPORT)."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from npufleet.cluster.addresses import netloc
from npufleet.cluster.controller.wire import snapshot_to_dict
from npufleet.cluster.endpoints import EndpointSource, Snapshot
from npufleet.cluster.folder import Folder
from npufleet.cluster.router.processes.metrics import collect
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.shares import ShareTable, Slots, create
from npufleet.cluster.router.settings import WARM_SECONDS
from npufleet.cluster.router.watch import follow

_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_SHORTEST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_BEYOND_GRACE = 10.0  # seconds that a process may take to end beyond its running calls


class RouterProcesses:
    """``number`` processes over one source. All methods belong to one event loop."""

    def __init__(self, source: EndpointSource, setup: Setup, number: int, *, first: int = 0) -> None:
        """They are called ``first``, ``first`` + 1 and so on in logs and metrics. ``setup.port`` 0 takes a free
        port.
        """
        self._source = source
        self._setup = setup
        self._number = number
        self._first = first
        self._own = Folder("npufleet-routers-")
        self._folder = self._own.path
        self._rows = first + number
        self._shares = self._folder / "shares"
        create(self._shares, self._rows)
        self.table = ShareTable(self._shares, self._rows, 0)  # of a router in this process, number 0
        self._slots = Slots()
        self._held: socket.socket | None = None
        self._line = b""  # the newest set of engines
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0

    @property
    def port(self) -> int:
        """The port they share."""
        return self._setup.port

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return netloc(self._setup.host, self.port)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of those that run, by number."""
        return {number: child.pid for number, child in self._children.items() if child.returncode is None}

    async def start(self) -> None:
        """Start all and wait until each serves; OSError where one does not."""
        self._held = hold_port(self._setup.host, self._setup.port)
        self._setup = replace(self._setup, port=self._held.getsockname()[1])
        engines = follow(self._source, self._tell)
        self._tasks = [asyncio.create_task(engines, name="router processes: engines")]
        numbers = range(self._first, self._first + self._number)
        started = await asyncio.gather(*map(self._launch, numbers), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        self._tasks += [asyncio.create_task(self._watch(n), name=f"router process {n}") for n in numbers]

    async def close(self, grace: float | None = None) -> None:
        """End all; running calls may go on for their grace."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(self._end(child, grace) for child in self._children.values()))
        if self._held is not None:
            self._held.close()
        self._own.close()

    async def metrics(self) -> bytes:
        """The series of all processes in the format of Prometheus, with the label ``process``."""
        return await collect({str(number): self._metrics_socket(number) for number in self.pids})

    async def _launch(self, number: int, warm: float | None = None) -> None:
        self._metrics_socket(number).unlink(missing_ok=True)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "npufleet.cluster.router.processes.child"),
            str(self._metrics_socket(number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._children[number] = child
        assert child.stdin is not None and child.stdout is not None
        warm = self._setup.warm if warm is None else warm
        setup = replace(self._setup, warm=warm, shares=str(self._shares), row=number, rows=self._rows)
        child.stdin.write(setup.to_line() + self._line)
        try:
            async with asyncio.timeout(_START_SECONDS):
                said = await child.stdout.readline()
        except TimeoutError as error:
            child.kill()
            raise OSError(f"router process {number} did not serve within {_START_SECONDS:g} s") from error
        if said != b"ready\n":
            raise OSError(f"router process {number} ended with {await child.wait()} while it started")

    async def _watch(self, number: int) -> None:
        """Start the process again each time it ends."""
        pause = _SHORTEST_PAUSE
        while True:
            code = await self._children[number].wait()
            _log.error("router process %d ended with %d; starting it again in %g s", number, code, pause)
            self.table.clear(number)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            self.restarts += 1
            try:
                await self._launch(number, WARM_SECONDS)  # the others take calls meanwhile
            except OSError as error:
                _log.error("%s", error)
            else:
                pause = _SHORTEST_PAUSE

    def _tell(self, snapshot: Snapshot) -> None:
        slots = self._slots.update({name for endpoint in snapshot.endpoints for name in endpoint.rank_ids})
        self.table.assign(slots)
        told = {"snapshot": snapshot_to_dict(snapshot), "slots": slots}
        self._line = json.dumps(told).encode() + b"\n"
        for child in self._children.values():
            assert child.stdin is not None
            if child.returncode is None and not child.stdin.is_closing():
                child.stdin.write(self._line)

    async def _end(self, child: asyncio.subprocess.Process, grace: float | None) -> None:
        if child.returncode is not None:
            return
        with suppress(ProcessLookupError):
            child.terminate()
        grace = self._setup.grace if grace is None else grace
        try:
            await asyncio.wait_for(child.wait(), grace + _BEYOND_GRACE)
        except TimeoutError:
            child.kill()
            await child.wait()

    def _metrics_socket(self, number: int) -> Path:
        return self._folder / f"{number}.http"


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that keeps ``port`` (0: a free one) for those who share it; it takes no connections itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise OSError(f"the router cannot listen on {netloc(host, port)}: {error.strerror}") from error
    return held
