"""Part b: concurrent streams through gateway and router against the same engine alone.

``npufleet serve`` brings up one engine. Rounds alternate between two ways to it: streaming
``/v1/completions`` at the gateway (HTTP, gateway, router, gRPC), and streaming ``Generate`` calls straight
at the engine's gRPC port. Prompts, batch and engine are the same, so the ratio is what the way costs. For
comparison, an engine of the same settings runs as vLLM's ``AsyncLLM`` in a process of its own: no gRPC, no
Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import httpx
from engine_process import Engine
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

from npufleet.cluster import runs
from npufleet.cluster.router.lookaside.tokens import TOKEN_KEY, TokenMint

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": False,
}
START_S = 400.0
NAME = "bench"


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Where the fleet listens."""

    gateway: str  # http://host:port
    engine: str  # host:port
    model: str
    secret: str  # that the engine wants to be shown


def prompts(streams: int) -> list[list[int]]:
    """Token-id prompts of 16 tokens, all different."""
    return [[1000 + 17 * stream + 3 * position for position in range(16)] for stream in range(streams)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def fleet(model: Path, threads: int) -> Iterator[Ways]:
    """A fleet of one engine, ready to answer; stopped on leaving.

    Raises:
        RuntimeError: if it does not come up, with what it printed.
    """
    http, router, metrics = (_free_port() for _ in range(3))
    settings = [
        item for key, value in ENGINE.items() for item in ("--set", f"engine.{key}={json.dumps(value)}")
    ]
    command = [
        sys.executable,
        "-m",
        "npufleet.cluster.cli",
        "serve",
        str(model),
        "--name",
        f"{NAME}-{os.getpid()}",
    ]
    command += [
        "--replicas",
        "1",
        "--port",
        str(http),
        "--grpc-port",
        str(router),
        "--metrics-port",
        str(metrics),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        try:
            yield _wait_ready(process, f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/status", log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_ready(process: subprocess.Popen[bytes], gateway: str, status: str, log: Any) -> Ways:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{gateway}/health", timeout=5).status_code == 200:
                state = httpx.get(status, timeout=5).json()
                served = httpx.get(f"{gateway}/v1/models", timeout=5).json()
                return Ways(
                    gateway=gateway,
                    engine=state["engines"][0]["address"],
                    model=served["data"][0]["id"],
                    secret=runs.find(state["fleet"]).engine_secret,
                )
        except (httpx.HTTPError, KeyError, IndexError):
            pass  # not up yet
        time.sleep(0.5)
    log.seek(0)
    raise RuntimeError(f"the fleet did not come up:\n{log.read()[-4000:]}")


async def through_gateway(session: aiohttp.ClientSession, ways: Ways, prompt: list[int], tokens: int) -> int:
    """One streamed completion; the number of tokens that the gateway says it sent."""
    body = {
        "model": ways.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = b""
    async with session.post(f"{ways.gateway}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                last = line
    return int(json.loads(last[6:])["usage"]["completion_tokens"])


async def to_engine(stub: rpc.VllmEngineStub, secret: str, prompt: list[int], tokens: int, name: str) -> int:
    """One streamed Generate call; the number of tokens received."""
    request = pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        stream=True,
    )
    count = 0
    async for answer in stub.Generate(request, metadata=((TOKEN_KEY, TokenMint(secret.encode()).fleet()),)):
        if answer.HasField("chunk"):
            count += len(answer.chunk.token_ids)
    return count


async def _rate(calls: Sequence[Awaitable[int]]) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*calls)
    return sum(counts) / (time.perf_counter() - began)


async def _alternate(
    ways: Ways, streams: int, tokens: int, rounds: int, alone: Engine
) -> dict[str, list[float]]:
    batch = prompts(streams)
    rates: dict[str, list[float]] = {"gateway": [], "grpc": [], "async_llm": []}
    connector = aiohttp.TCPConnector(limit=streams)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        grpc.aio.insecure_channel(ways.engine) as channel,
    ):
        stub = rpc.VllmEngineStub(channel)

        async def gateway(_: int) -> float:
            return await _rate([through_gateway(session, ways, prompt, tokens) for prompt in batch])

        async def direct(turn: int) -> float:
            calls = [
                to_engine(stub, ways.secret, p, tokens, f"bench-{turn}-{i}") for i, p in enumerate(batch)
            ]
            return await _rate(calls)

        async def in_process(_: int) -> float:
            answer = alone.run(prompts=batch, tokens=tokens)
            return answer["tokens"] / answer["seconds"]

        order: list[tuple[str, Callable[[int], Awaitable[float]]]] = [
            ("gateway", gateway),
            ("grpc", direct),
            ("async_llm", in_process),
        ]
        for turn in range(-1, rounds):  # the first turn warms up
            for name, measure_once in order if turn % 2 else order[::-1]:
                rate = await measure_once(turn)
                if turn >= 0:
                    rates[name].append(rate)
    return rates


def measure(
    model: Path, streams: int, tokens: int, rounds: int, threads: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start the fleet and the lone engine, alternate, stop both."""
    settings = {"model": str(model), **ENGINE, "mode": "async"}
    with fleet(model, threads) as ways:
        say("fleet is up")
        with Engine(sys.executable, settings, {"OMP_NUM_THREADS": str(threads)}) as alone:
            alone.ready()
            rates = asyncio.run(_alternate(ways, streams, tokens, rounds, alone))
    return {
        "streams": streams,
        "tokens": tokens,
        "tokens_per_second": rates,
        "median": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": _paired(rates["gateway"], rates["grpc"]),
        "ratio_to_async_llm": _paired(rates["gateway"], rates["async_llm"]),
    }


def _paired(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    titles = {
        "gateway": "gateway and router",
        "grpc": "same engine, gRPC",
        "async_llm": "AsyncLLM, no gRPC",
    }
    lines = [f"(b) tokens/s, {result['streams']} concurrent streams x {result['tokens']} tokens"]
    for name, title in titles.items():
        rounds = "  ".join(f"{rate:7.1f}" for rate in result["tokens_per_second"][name])
        lines.append(f"    {title:<18} median {result['median'][name]:7.1f}   rounds {rounds}")
    lines.append(f"    ratio to the engine alone {result['ratio']:.2f} (wanted: at least 0.90)")
    lines.append(f"    ratio to AsyncLLM without gRPC and Ray {result['ratio_to_async_llm']:.2f}")
    return lines
