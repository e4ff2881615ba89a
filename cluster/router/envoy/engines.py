"""The engines that Envoy may send requests to: the pool's, by IP address, kept in a file that Envoy follows."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from npufleet.cluster.router.envoy.config import as_json, endpoints
from npufleet.cluster.router.pool import EnginePool

_log = logging.getLogger(__name__)
_RETRY = 1.0
_AGAIN = 30.0


class EngineAddresses:
    """IP and port by engine id. Names in addresses are looked up when an engine comes and twice a minute."""

    def __init__(self, pool: EnginePool, file: Path | None) -> None:
        """``file`` is where Envoy looks; None: nobody looks."""
        self._pool = pool
        self._file = file
        self._resolved: dict[str, tuple[str, tuple[str, int]]] = {}  # by id: the address as given, as an IP
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._written = ""
        pool.listen(self._changed.set)

    async def start(self) -> None:
        """Write the file and keep it, in the running event loop."""
        assert self._task is None, "starts once"
        await self._update()
        self._task = asyncio.create_task(self._follow(), name="router engines for envoy")

    async def close(self) -> None:
        """Stop. The file stays, so that Envoy goes on with the engines it knows."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def get(self, engine_id: str) -> tuple[str, int] | None:
        """The engine's IP address and port, None while it is not known."""
        found = self._resolved.get(engine_id)
        return None if found is None else found[1]

    def known(self) -> dict[str, tuple[str, int]]:
        """All of them by engine id."""
        return {engine_id: found[1] for engine_id, found in self._resolved.items()}

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN):
                    await self._changed.wait()
            self._changed.clear()
            if not await self._update():
                await asyncio.sleep(_RETRY)
                self._changed.set()

    async def _update(self) -> bool:
        """Take the pool as it is; False where a name could not be resolved or the file not be written."""
        wanted = {member.engine_id: member.endpoint.address for member in self._pool.members()}
        complete = True
        for engine_id, address in wanted.items():
            known = self._resolved.get(engine_id)
            if known is None or known[0] != address or known[1] != split(address):  # a name may move
                try:
                    self._resolved[engine_id] = (address, await resolve(address))
                except OSError as error:
                    complete = False
                    _log.warning("engine %s: its address %s is not known: %s", engine_id, address, error)
        self._resolved = {key: value for key, value in self._resolved.items() if key in wanted}
        return self._write() and complete

    def _write(self) -> bool:
        text = as_json(endpoints(self.known()))
        if self._file is None or text == self._written:
            return True
        new = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            os.replace(new, self._file)  # Envoy notices a file that is moved into place
        except OSError as error:
            _log.error("the engines cannot be told to Envoy: %s", error)
            return False
        self._written = text
        return True


def split(address: str) -> tuple[str, int]:
    """Host and port of host:port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def resolve(address: str) -> tuple[str, int]:
    """The IP address and the port of host:port; OSError where the name is not known."""
    host, port = split(address)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0]), port
