"""An HTTP/2 server that a test writes frame by frame, to be as wrong as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hpack import Encoder

from npufleet.cluster.transport.base import LinkSettings
from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.channel import Http2Channel

PATH = "/test.Service/Call"
QUICK = LinkSettings(keepalive_time=30, keepalive_timeout=1, connect_timeout=5, reconnect_backoff=0.1)


def headers(stream: int, pairs: list[tuple[str, str]], *, ends: bool = False, whole: bool = True) -> bytes:
    """A HEADERS frame with literals that no table remembers."""
    block = Encoder().encode([(name, value, True) for name, value in pairs], huffman=False)
    flags = (frames.END_STREAM if ends else 0) | (frames.END_HEADERS if whole else 0)
    return frames.frame(frames.HEADERS, flags, stream, block)


def begin(stream: int) -> bytes:
    return headers(stream, [(":status", "200"), ("content-type", "application/grpc")])


def data(stream: int, *messages: bytes) -> bytes:
    payload = b"".join(b"\0" + len(m).to_bytes(4, "big") + m for m in messages)
    return frames.frame(frames.DATA, 0, stream, payload)


def trailers(stream: int, code: int = 0, message: str = "") -> bytes:
    return headers(stream, [("grpc-status", str(code)), ("grpc-message", message)], ends=True)


def answer(stream: int, *messages: bytes) -> bytes:
    return begin(stream) + data(stream, *messages) + trailers(stream)


@dataclass
class Peer:
    """One accepted connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def open(self, settings: dict[int, int] | None = None) -> None:
        assert await self.reader.readexactly(len(frames.PREFACE)) == frames.PREFACE
        self.write(frames.settings(settings or {}))

    def write(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def frame(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, payload."""
        packed, flags, stream = frames.HEAD.unpack(await self.reader.readexactly(9))
        return packed & 0xFF, flags, stream, await self.reader.readexactly(packed >> 8)

    async def until(self, kind: int) -> tuple[int, int, bytes]:
        """The next frame of ``kind``: flags, stream, payload."""
        while True:
            found, flags, stream, payload = await self.frame()
            if found == kind:
                return flags, stream, payload


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def against(*scripts: Script, settings: LinkSettings = QUICK) -> AsyncIterator[Http2Channel]:
    """A channel to a server whose n-th connection follows the n-th script, the last one for all others."""
    count = 0
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        script = scripts[min(count, len(scripts) - 1)]
        count += 1
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await script(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = Http2Channel(f"127.0.0.1:{port}", settings)
    try:
        async with asyncio.timeout(20):
            yield channel
    finally:
        await channel.close()
        server.close()
        for task in running:
            task.cancel()
