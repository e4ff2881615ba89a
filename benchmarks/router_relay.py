"""What the router's relay costs: CPU per call and per token, and what it adds to the first token.

A mock engine (grpc.aio, ready-made bytes) runs in a process of its own and the router in another; the client
is this process. Each load runs straight against the engine and through the router, in turns; medians are
printed. CPU is the router process's user and system time, so it holds on a busy machine; the times of day do
not.

    python benchmarks/router_relay.py --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import psutil
import uvloop
from smg_grpc_proto import vllm_engine_pb2 as pb

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
MODEL = "bench"
_STEP_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class Load:
    """``streams`` concurrent calls of ``tokens`` tokens each, ``calls`` in all."""

    name: str
    calls: int
    streams: int
    tokens: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Microseconds of CPU per call, seconds for all, and the first tokens' latencies in milliseconds."""

    cpu_per_call: float
    seconds: float
    first_ms: Sequence[float]


LOADS = (
    Load(name="short calls", calls=2000, streams=16, tokens=1, prompt=20),
    Load(name="one at a time", calls=500, streams=1, tokens=1, prompt=20),
    Load(name="paced streams", calls=160, streams=32, tokens=32, prompt=20),
    Load(name="long prompts", calls=200, streams=4, tokens=1, prompt=32_000),
)


async def engine() -> None:
    """Serve Generate: one token per step to every open stream, all in the same tick."""
    chunk = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1234], completion_tokens=7))
    token = chunk.SerializeToString()
    tick = asyncio.Event()

    async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> None:
        tokens = pb.GenerateRequest.FromString(raw).sampling_params.max_tokens
        for _ in range(tokens):
            if tokens > 1:
                await tick.wait()
            await context.write(token)

    async def health(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"\x08\x01"  # SERVING

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    stream = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    check = {"Check": grpc.unary_unary_rpc_method_handler(health)}
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("vllm.grpc.engine.VllmEngine", stream),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", check),
        )
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    while True:
        await asyncio.sleep(_STEP_SECONDS)
        now, tick = tick, asyncio.Event()
        now.set()


async def drive(address: str, load: Load, process: psutil.Process) -> Measured:
    """Run ``load`` against ``address`` and charge ``process`` for it."""
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=range(load.prompt)),
        sampling_params=pb.SamplingParams(max_tokens=load.tokens),
        stream=True,
    ).SerializeToString()
    first: list[float] = []
    left = iter(range(load.calls))
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(GENERATE)

        async def worker() -> None:
            for _ in left:
                start, got = time.perf_counter(), 0
                async for _ in call(request):
                    if not got:
                        first.append((time.perf_counter() - start) * 1000)
                    got += 1
                assert got == load.tokens, f"{got} of {load.tokens} tokens"

        async for _ in call(request):
            pass  # the connection is up
        before, start = process.cpu_times(), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.streams)))
        seconds, after = time.perf_counter() - start, process.cpu_times()
    spent = (after.user + after.system) - (before.user + before.system)
    return Measured(cpu_per_call=spent / load.calls * 1e6, seconds=seconds, first_ms=first)


async def compare(direct: str, through: str, processes: Sequence[psutil.Process], rounds: int) -> None:
    """Print one row per load."""
    head = f"{'load':<14} {'calls/s':>8} {'direct':>8}  {'router us/call':>14} {'us/token':>9}"
    print(f"{head}  first token p50 ms")
    for load in LOADS:
        both: dict[str, list[Measured]] = {"direct": [], "router": []}
        for _ in range(rounds):
            both["direct"].append(await drive(direct, load, processes[0]))
            both["router"].append(await drive(through, load, processes[1]))
        cpu = statistics.median(m.cpu_per_call for m in both["router"])
        rate = {key: load.calls / statistics.median(m.seconds for m in ms) for key, ms in both.items()}
        p50 = {key: statistics.median(x for m in ms for x in m.first_ms) for key, ms in both.items()}
        print(
            f"{load.name:<14} {rate['router']:>8.0f} {rate['direct']:>8.0f}  {cpu:>14.0f} "
            f"{cpu / load.tokens:>9.1f}  {p50['router']:.2f} (direct {p50['direct']:.2f})"
        )


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A process of ours and the last word of its first line: a port or an address."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def main() -> None:
    """Start both processes, measure, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="least-load")
    parser.add_argument("--serve-engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_engine:
        uvloop.run(engine())
        return
    mock, port = start(__file__, "--serve-engine")
    direct = f"127.0.0.1:{port}"
    options = ("--engine", direct, "--model", MODEL, "--port", "0", "--policy", args.policy)
    router, through = start("-m", "npufleet.cluster.router", *options)
    try:
        time.sleep(1)  # the router's first health check
        processes = [psutil.Process(mock.pid), psutil.Process(router.pid)]
        uvloop.run(compare(direct, through, processes, args.rounds))
    finally:
        for process in (router, mock):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
