"""A mock engine whose answers tell who gave them and to which request: VllmEngine over gRPC and OpenAI chat over HTTP.

``python -m benchmarks.router.fault_engine GRPC_PORT HTTP_PORT LETTER TOKENIZER_DIR``. A prompt holds a mark, as in
``#1207#``; its answer is the engine's letter and then the digits of the mark over and over, one character a token, so
that a client sees a token that is missing, repeated, or another request's. SIGUSR1 makes the engine slow, SIGUSR2
well again.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_servicer.tokenizer_bundle import TokenizerBundle, tokenizer_chunks

from benchmarks.router.mock_engine import MODEL
from tests.cluster.router_fakes import FakeEngine
from tests.fakes.tokenizer import MAX_MODEL_LEN

FIRST = ord("!")  # the character of token 0 in the test tokenizer; printable ones follow in order
DELAY, SLOW = 0.02, 0.4  # seconds before each token
_MARK = re.compile(r"#(\d+)#")


def ids_of(text: str) -> list[int]:
    """The tokens of printable characters in the test tokenizer."""
    return [ord(char) - FIRST for char in text]


def answer(letter: str, mark: str, tokens: int) -> str:
    """What the engine ``letter`` answers in ``tokens`` tokens."""
    return letter + "".join(islice(cycle(mark), tokens - 1))


@dataclass(eq=False)
class MarkEngine(FakeEngine):
    """The gRPC side; ``name`` is the letter."""

    tokenizer: Path = Path()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """The answer to the mark, one character at a time."""
        prompt = "".join(chr(FIRST + i) for i in request.tokenized.input_ids if i < 94)
        count = request.sampling_params.max_tokens
        ids = ids_of(await self.text(prompt, count))
        for done, token in enumerate(ids, 1):
            await asyncio.sleep(self.delay)
            chunk = pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=20, completion_tokens=done)
            yield pb.GenerateResponse(chunk=chunk)
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=ids, finish_reason="length", prompt_tokens=20, completion_tokens=count
            )
        )

    async def text(self, prompt: str, count: int) -> str:
        """The next ``count`` characters of the answer to ``prompt``; one without a mark is a router's own question."""
        mark = _MARK.search(prompt)
        if mark is None:
            return answer(self.name, "0", count)
        done = len(prompt) - mark.end()
        return answer(self.name, mark.group(1), done + count)[done:]

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """The test tokenizer's model."""
        return pb.GetModelInfoResponse(
            model_path=str(self.tokenizer),
            is_generation=True,
            max_context_length=MAX_MODEL_LEN,
            vocab_size=260,
            served_model_name=MODEL,
            tokenizer_path=str(self.tokenizer),
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[259],
            max_req_input_len=MAX_MODEL_LEN,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        """One rank of vLLM."""
        return pb.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The tokenizer's files."""
        for part in tokenizer_chunks(*TokenizerBundle.build(self.tokenizer)):
            yield part

    async def http(self, scope: Any, receive: Any, send: Any) -> None:
        """The HTTP side: chat as a stream, and a description for every GET."""
        if scope["method"] != "POST":
            about = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}
            await _start(send, b"application/json")
            await send({"type": "http.response.body", "body": json.dumps({**about, "id": MODEL}).encode()})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = json.loads(body)
        prompt = str((request.get("messages") or [{"content": ""}])[-1]["content"])
        await _start(send, b"text/event-stream")
        count = request.get("max_tokens") or request.get("max_completion_tokens") or 1
        for char in await self.text(prompt, count):
            await asyncio.sleep(self.delay)
            await send({"type": "http.response.body", "body": _event(char), "more_body": True})
        last = _event("", "length") + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last})


async def _start(send: Any, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})


def _event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**about, "choices": [choice]}).encode() + b"\n\n"


async def main(grpc_port: int, http_port: int, letter: str, tokenizer: Path) -> None:
    """Serve until killed."""
    engine = MarkEngine(name=letter, port=grpc_port, delay=DELAY, tokenizer=tokenizer)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, engine, "delay", SLOW)
    loop.add_signal_handler(signal.SIGUSR2, setattr, engine, "delay", DELAY)
    await engine.start()
    config = uvicorn.Config(
        engine.http,
        interface="asgi3",
        port=http_port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="none",
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
