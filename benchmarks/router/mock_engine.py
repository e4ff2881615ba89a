"""A mock engine in its own process: VllmEngine over gRPC, OpenAI chat over HTTP, and an engine core for vLLM's own API
server, without a model.

The first token of a request goes out at once; further ones in step: every 10 ms each open stream gets one, as an
engine sends them. ``python -m benchmarks.router.mock_engine TOKENIZER_DIR CORE_DIR``
prints ``GRPC_ADDRESS HTTP_ADDRESS``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import uvicorn
import uvloop
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_servicer.tokenizer_bundle import TokenizerBundle, tokenizer_chunks

if TYPE_CHECKING:
    from benchmarks.router.mock_core import MockCore

SERVICE = "vllm.grpc.engine.VllmEngine"
MODEL = "bench"
TOKEN = 66  # the letter "a" in the test tokenizer
STEP_SECONDS = 0.01
CONTEXT = 4096


class Steps:
    """Ticks that all streams of the engine wait for together."""

    def __init__(self, core: MockCore) -> None:
        self._next = asyncio.Event()
        self._core = core

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            await self._core.step()
            now, self._next = self._next, asyncio.Event()
            now.set()

    async def tokens(self, count: int) -> AsyncIterator[int]:
        """``count`` numbers, the first at once."""
        for number in range(count):
            if number:
                await self._next.wait()
            yield number


def grpc_server(steps: Steps, tokenizer: Path) -> grpc.aio.Server:
    """VllmEngine as far as routers use it; token messages are ready-made bytes."""
    chunk = pb.GenerateStreamChunk(token_ids=[TOKEN], prompt_tokens=20, completion_tokens=7)
    token = pb.GenerateResponse(chunk=chunk).SerializeToString()
    info = pb.GetModelInfoResponse(
        model_path=str(tokenizer),
        is_generation=True,
        max_context_length=CONTEXT,
        vocab_size=260,
        served_model_name=MODEL,
        tokenizer_path=str(tokenizer),
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[259],
        max_req_input_len=CONTEXT,
    )
    loads = pb.GetLoadsResponse(dp_rank_count=1, loads=[pb.SchedulerLoad(max_running_requests=256)])

    async def generate(raw: bytes, context: Any) -> None:
        count = pb.GenerateRequest.FromString(raw).sampling_params.max_tokens
        async for _ in steps.tokens(count):
            await context.write(token)
        done = pb.GenerateComplete(
            output_ids=[TOKEN] * count, finish_reason="length", prompt_tokens=20, completion_tokens=count
        )
        await context.write(pb.GenerateResponse(complete=done).SerializeToString())

    async def files(raw: bytes, context: Any) -> None:
        for part in tokenizer_chunks(*TokenizerBundle.build(tokenizer)):
            await context.write(part.SerializeToString())

    def unary(answer: Any) -> Any:
        raw_answer = answer.SerializeToString()

        async def handle(raw: bytes, context: Any) -> bytes:
            return raw_answer

        return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(files),
        "GetModelInfo": unary(info),
        "GetServerInfo": unary(pb.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1)),
        "GetLoads": unary(loads),
        "HealthCheck": unary(pb.HealthCheckResponse(healthy=True)),
        "FlushCache": unary(common_pb2.FlushCacheResponse(success=True)),
    }
    health = {"Check": unary(common_pb2.KvEventBatch(sequence_number=1))}  # the same bytes as SERVING
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        )
    )
    return server


def http_app(steps: Steps) -> Any:
    """OpenAI chat streaming as a bare ASGI application; every GET is answered with 200."""
    event = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}],
    }
    token = b"data: " + json.dumps(event).encode() + b"\n\n"
    about = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL, "id": MODEL}
    described = json.dumps(about).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = b"application/json"
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
            await send({"type": "http.response.body", "body": described})
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = json.loads(body)
        count = request.get("max_tokens") or request.get("max_completion_tokens") or 1
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for _ in steps.tokens(count):
            await send({"type": "http.response.body", "body": token, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def main(tokenizer: Path, folder: Path) -> None:
    """Serve until killed. ``folder`` gets the sockets of the core."""
    from benchmarks.router.mock_core import MockCore  # not at the top: vLLM takes seconds to load

    core = MockCore(folder, TOKEN)
    steps = Steps(core)
    server = grpc_server(steps, tokenizer)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        http_app(steps), log_level="warning", access_log=False, lifespan="off", loop="none"
    )
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[sock]))
    print(f"127.0.0.1:{port} 127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await asyncio.gather(serving, steps.run(), core.run())


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
