"""What the router's relay costs: CPU per call and per token, and what it adds to the first token.

A mock engine (grpc.aio, ready-made bytes), the router, and a bare relay (the least that passes bytes from one
grpc.aio server to another) run in processes of their own; the client is this process. Each load runs straight
against the engine, through the bare relay and through the router, in turns; medians are printed. CPU is the
relaying process's user and system time. What the router adds to the bare relay is its own share; the rest is
grpc.aio's.

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

SERVICE = "vllm.grpc.engine.VllmEngine"
GENERATE = f"/{SERVICE}/Generate"
ROUTER = ("-m", "npufleet.cluster.router", "--model", "bench", "--port", "0", "--engine")
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
            grpc.method_handlers_generic_handler(SERVICE, stream),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", check),
        )
    )
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    while True:
        await asyncio.sleep(_STEP_SECONDS)
        now, tick = tick, asyncio.Event()
        now.set()


async def bare_relay(engine_address: str) -> None:
    """Pass Generate through and do nothing else."""
    call = grpc.aio.insecure_channel(engine_address).unary_stream(GENERATE)

    async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> None:
        async for message in call(raw):
            await context.write(message)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    stream = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, stream),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


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


async def compare(paths: dict[str, tuple[str, psutil.Process]], rounds: int) -> None:
    """Print one row per load and path; ``paths`` has an address and the process to charge for each."""
    print(
        f"{'load':<14} {'path':<7} {'calls/s':>8} {'us/call':>8} {'us/token':>9} {'first token p50 ms':>19}"
    )
    for load in LOADS:
        measured: dict[str, list[Measured]] = {name: [] for name in paths}
        for _ in range(rounds):
            for name, (address, process) in paths.items():
                measured[name].append(await drive(address, load, process))
        for name, results in measured.items():
            cpu = statistics.median(one.cpu_per_call for one in results)
            rate = load.calls / statistics.median(one.seconds for one in results)
            first = statistics.median(ms for one in results for ms in one.first_ms)
            row = (
                f"{load.name:<14} {name:<7} {rate:>8.0f} {cpu:>8.0f} {cpu / load.tokens:>9.1f} {first:>19.2f}"
            )
            print(row, flush=True)


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A process of ours and the last word of its first line: its address."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def main() -> None:
    """Start the processes, measure, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="least-load")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(engine() if args.serve[0] == "engine" else bare_relay(args.serve[1]))
        return
    processes: list[subprocess.Popen[str]] = []
    paths: dict[str, tuple[str, psutil.Process]] = {}
    try:
        for name, command in (
            ("direct", (__file__, "--serve", "engine")),
            ("bare", (__file__, "--serve", "relay", "{engine}")),
            ("router", (*ROUTER, "{engine}", "--policy", args.policy)),
        ):
            engine_address = paths["direct"][0] if paths else ""
            process, address = start(*(word.format(engine=engine_address) for word in command))
            processes.append(process)
            paths[name] = (address, psutil.Process(process.pid))
        time.sleep(1)  # the router's first health check
        uvloop.run(compare(paths, args.rounds))
    finally:
        for process in processes:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
