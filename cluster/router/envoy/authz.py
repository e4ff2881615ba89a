"""The picker behind Envoy's ext_authz filter, over HTTP/1.1 on a Unix socket.

Envoy sends each Generate or Embed here before it sends it anywhere, headers and body, and goes on with the
headers of our 200. Any other answer is the client's: Envoy makes a gRPC status of it, whose code and metadata
our headers set and whose message is our body. A status of 500 and above would count as a broken picker, so
none is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

import grpc
import httptools

from npufleet.cluster.router.call import CallError
from npufleet.cluster.router.envoy.ask import Asked
from npufleet.cluster.router.envoy.settings import FRAME

_log = logging.getLogger(__name__)
_STARTED = b"/started/"


class AuthzServer:
    """The listening socket."""

    def __init__(self, asked: Asked, where: Path, max_bytes: int) -> None:
        self._asked = asked
        self._where = where
        self._max_bytes = max_bytes
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()

    async def start(self) -> None:
        """Listen, in the running event loop. OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        with suppress(FileNotFoundError):
            self._where.unlink()
        self._server = await loop.create_unix_server(
            lambda: _Connection(self._asked, self._max_bytes, self._open), str(self._where)
        )

    async def close(self) -> None:
        """Stop; requests that still wait for their engine end with UNAVAILABLE."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._open):
            connection.close()
        await self._server.wait_closed()


class _Connection(asyncio.Protocol):
    """One connection of Envoy; requests come one after another."""

    def __init__(self, asked: Asked, max_bytes: int, among: set[_Connection]) -> None:
        self._asked = asked
        self._most = max_bytes + FRAME
        self._among = among
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def close(self) -> None:
        """Let go of Envoy."""
        if self._transport is not None:
            self._transport.close()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's
        self._among.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._among.discard(self)
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            _log.error("what reached the picker's socket is not HTTP: %s", error)
            self.close()

    # httptools

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("ascii", "replace").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= self._most:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        url, headers, body = self._url, self._headers, b"".join(self._parts)
        self._begin()
        if url.startswith(_STARTED):
            self._asked.away.started(url[len(_STARTED) :].decode("ascii", "replace"))
            self._answer(b"200 OK", ())
            return
        task = asyncio.create_task(self._place(url.decode("ascii", "replace"), headers, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _place(self, path: str, headers: dict[str, str], body: bytes) -> None:
        try:
            placed = await self._asked.place(path, headers, body)
        except CallError as error:
            self._refuse(error)
        else:
            if self._transport is None or self._transport.is_closing():
                self._asked.away.ended(placed.away.id, grpc.StatusCode.CANCELLED)  # Envoy has gone on
                return
            self._answer(b"200 OK", placed.headers)

    def _refuse(self, error: CallError) -> None:
        text = {key: value for key, value in error.trailing if isinstance(value, str)}
        text["grpc-status"] = str(error.code.value[0])
        self._answer(b"429 No Engine", text.items(), error.details.encode())

    def _answer(self, status: bytes, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        if self._transport is None or self._transport.is_closing():
            return
        lines = [b"HTTP/1.1 %b\r\ncontent-length: %d\r\n" % (status, len(body))]
        lines += [b"%b: %b\r\n" % (key.encode(), value.encode()) for key, value in headers]
        self._transport.write(b"".join((*lines, b"\r\n", body)))
