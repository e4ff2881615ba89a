"""Clients of the fault runs: they ask one question after the other and check each token of each answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from benchmarks.router.fault_engine import FIRST, answer, ids_of
from benchmarks.router.mock_engine import MODEL
from tests.cluster.router_fakes import generate_request

TOKENS = 40
CALL_SECONDS = 30.0


@dataclass
class Answer:
    """What came of one call."""

    text: str = ""
    whole: bool = False  # it was said to be whole
    error: str = ""  # what its client was told; an answer that just stops has none


@dataclass
class Notes:
    """What the clients saw. Times are seconds since the start."""

    start: float = field(default_factory=time.monotonic)
    whole: list[tuple[float, float, str]] = field(default_factory=list)  # began, ended, engine
    broken: list[float] = field(default_factory=list)  # streams that had begun and ended with an error
    silent: list[float] = field(default_factory=list)  # streams that just stopped, as if they were whole
    failed: list[tuple[float, str]] = field(default_factory=list)  # calls that had not begun
    wrong: int = 0  # answers with a token that is not the right one

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def take(self, began: float, mark: str, got: Answer) -> None:
        """Note the answer to ``mark``."""
        engine, now = got.text[:1], self.now()
        right = answer(engine, mark, TOKENS)
        self.wrong += not right.startswith(got.text) or (got.whole and got.text != right)
        if got.whole:
            self.whole.append((began, now, engine))
        elif got.text and not got.error:
            self.silent.append(now)
        elif got.text:
            self.broken.append(now)
        else:
            self.failed.append((now, got.error or "an empty answer"))


Ask = Callable[[str], Awaitable[Answer]]


async def ask_grpc(stub: pb_grpc.VllmEngineStub, mark: str) -> Answer:
    """One stream of the VllmEngine service."""
    got = Answer()
    request = generate_request(TOKENS, tuple(ids_of(f"#{mark}#")), "")
    request.sampling_params.temperature = 0.0  # as over HTTP
    try:
        async for message in stub.Generate(request, timeout=CALL_SECONDS):
            got.text += "".join(chr(FIRST + token) for token in message.chunk.token_ids)
            got.whole = got.whole or message.HasField("complete")
    except grpc.aio.AioRpcError as error:
        got.error = f"{error.code().name}: {error.details()}"
    return got


async def ask_http(session: aiohttp.ClientSession, url: str, mark: str) -> Answer:
    """One stream of OpenAI chat."""
    got = Answer()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"#{mark}#"}],
        "max_tokens": TOKENS,
        "stream": True,
        "temperature": 0,
    }
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                got.error = f"{response.status}: {(await response.text())[:200]}"
                return got
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    got.whole = not got.error
                    continue
                event = json.loads(data)
                if "error" in event:
                    got.error = str(event["error"])
                for choice in event.get("choices", ()):
                    got.text += choice["delta"].get("content") or ""
    except (aiohttp.ClientError, TimeoutError) as error:
        got.error = repr(error)
    return got


async def client(speaks: str, address: str, number: int, notes: Notes, until: float) -> None:
    """One call after the other on a connection of its own until ``until`` seconds after the start."""

    async def go_on(ask: Ask) -> None:
        round_ = 0
        while notes.now() < until:
            round_ += 1
            mark, began = f"{number:02d}{round_:04d}", notes.now()
            got = await ask(mark)
            notes.take(began, mark, got)
            if not got.text:
                await asyncio.sleep(0.05)

    if speaks == "grpc":
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        options += [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = pb_grpc.VllmEngineStub(channel)
            await go_on(lambda mark: ask_grpc(stub, mark))
    else:
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await go_on(lambda mark: ask_http(session, f"http://{address}", mark))


async def until_ready(speaks: str, address: str, seconds: float) -> None:
    """Until every engine has answered through the router; TimeoutError after ``seconds``."""
    async with asyncio.timeout(seconds):
        notes = Notes()
        while {engine for _, _, engine in notes.whole} != set("ABC"):
            await asyncio.gather(*(client(speaks, address, i, notes, notes.now() + 0.1) for i in range(6)))
            await asyncio.sleep(0.3)
