"""Clients that put load on one address and note when each first token came."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import httptools
from smg_grpc_proto import vllm_engine_pb2 as pb

from benchmarks.router.mock_engine import MODEL, SERVICE

_TEXT = re.compile(rb'"content":\s*"([^"]+)"')  # each token of the mock engine is one letter


@dataclass(frozen=True, kw_only=True)
class Load:
    """``calls`` calls of ``tokens`` tokens each, ``streams`` at once, their starts spread over ``spread`` seconds.

    Without a spread all streams start, and later end and start again, in the same instant, and the first token's
    time is that of the client's burst.
    """

    name: str
    calls: int
    streams: int
    tokens: int
    spread: float = 0.0


@dataclass(kw_only=True)
class Seen:
    """What a load saw: seconds for all, milliseconds to each first token."""

    seconds: float = 0.0
    first_ms: list[float] = field(default_factory=list)


Call = Callable[[int, Seen], Awaitable[None]]


async def _drive(load: Load, calls: list[Call]) -> Seen:
    """Run ``load`` with one of ``calls`` per stream."""
    seen, warm = Seen(), Seen()
    for call in calls:
        await call(1, warm)  # the connections are up
    left = iter(range(load.calls))

    async def worker(call: Call, wait: float) -> None:
        await asyncio.sleep(wait)
        for _ in left:
            await call(load.tokens, seen)

    start = time.perf_counter()
    await asyncio.gather(*(worker(c, load.spread * i / load.streams) for i, c in enumerate(calls)))
    seen.seconds = time.perf_counter() - start
    return seen


async def over_grpc(address: str, load: Load) -> Seen:
    """All streams on one connection."""
    requests = {
        count: pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=range(20)),
            sampling_params=pb.SamplingParams(max_tokens=count),
            stream=True,
        ).SerializeToString()
        for count in (1, load.tokens)
    }
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(f"/{SERVICE}/Generate")

        async def call(tokens: int, seen: Seen) -> None:
            start, got = time.perf_counter(), 0
            async for _ in generate(requests[tokens]):
                if not got:
                    seen.first_ms.append((time.perf_counter() - start) * 1000)
                got += 1
            assert got == tokens + 1, f"{got} messages for {tokens} tokens"

        return await _drive(load, [call] * load.streams)


class _Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection; counts tokens as they come in."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first_at = 0.0
        self.status = 0
        self.body = b""
        self._rest = b""
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the connection was closed"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")  # an event may be cut by a chunk's end
        found = sum(len(text) for event in events for text in _TEXT.findall(event))
        if found and not self.tokens:
            self.first_at = time.perf_counter()
        self.tokens += found
        if self.status != 200:
            self.body += body

    def on_message_complete(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        assert self.done is not None
        if not self.done.done():
            self.done.set_result(None)


async def over_http(address: str, load: Load) -> Seen:
    """OpenAI chat, each stream on a connection of its own."""
    host, _, port = address.rpartition(":")
    requests = {count: _chat(address, count) for count in (1, load.tokens)}
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(_Connection, host, int(port)) for _ in range(load.streams)]

    def caller(connection: _Connection) -> Call:
        async def call(tokens: int, seen: Seen) -> None:
            connection.tokens, connection.done = 0, loop.create_future()
            start = time.perf_counter()
            assert connection.transport is not None
            connection.transport.write(requests[tokens])
            await connection.done
            assert connection.status == 200, connection.body[:500]
            assert connection.tokens == tokens, f"{connection.tokens} tokens instead of {tokens}"
            seen.first_ms.append((connection.first_at - start) * 1000)

        return call

    try:
        return await _drive(load, [caller(connection) for _, connection in made])
    finally:
        for transport, _ in made:
            transport.close()


def _chat(address: str, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
