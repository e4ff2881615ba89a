"""Simulated engines in a process of their own, over gRPC: events, loads, and what the index says of their caches."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.prompt import TokenPrompt, pack
from npufleet.cluster.router.prefix.wire import apply, load_of
from npufleet.cluster.router.server import RouterHandle, serve_router

from .router_fakes import QUICK, ListSource, until

BLOCK = 16
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """Addresses of two small engines that are fast, so that tests wait for little."""
    command = [sys.executable, "-m", "npufleet.cluster.cli", "sim-engine", "--engines", "2", "--block-size"]
    command += [str(BLOCK), "--kv-tokens", "2048", "--max-model-len", "1024", "--slow", "0.02"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert process.stdout is not None
    found: list[str] = []
    for line in process.stdout:
        found += re.findall(r"listens on (\S+)", line)
        if len(found) == 2:
            break
    assert len(found) == 2, "the engines did not come up"
    yield found
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def request(name: str, tokens: list[int], output: int = 4) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=tokens),
        sampling_params=pb.SamplingParams(max_tokens=output, ignore_eos=True),
        stream=True,
    )


async def finish(call) -> pb.GenerateComplete:
    done = None
    async for answer in call:
        if answer.HasField("complete"):
            done = answer.complete
    assert done is not None
    return done


@asynccontextmanager
async def routed(
    addresses: list[str],
) -> AsyncIterator[tuple[RouterHandle, vllm_engine_pb2_grpc.VllmEngineStub]]:
    source = ListSource(
        *(
            EngineEndpoint(engine_id=a, model="sim", address=a, metrics_url="", state=EngineState.READY)
            for a in addresses
        )
    )
    router = await serve_router(source, settings=QUICK)
    channel = grpc.aio.insecure_channel(router.address)
    try:
        await router.wait_ready(30)
        await until(lambda: len(router.picker.events.following) == len(addresses), 30)
        yield router, vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        await channel.close()
        await router.close(0.0)


async def settled(router: RouterHandle, seconds: float = 0.4) -> PrefixIndex:
    """The index once events had time to arrive and nothing is expected any more."""
    index = router.picker.decider.index("sim")
    assert index is not None
    await until(lambda: (index.match(TokenPrompt(tokens=b"")), index.expected == 0)[1], 30)
    await asyncio.sleep(seconds)
    return index


async def test_the_index_says_what_the_engines_have(engines):
    """Prompts from a tree, more than the caches hold, so that blocks come and go all the time."""
    chance = random.Random(7)
    stems = [[chance.randrange(250) for _ in range(400)] for _ in range(8)]
    async with routed(engines) as (router, stub):
        index = await settled(router)
        hits = 0
        for number in range(40):
            stem = chance.choice(stems)
            tokens = stem[: chance.randrange(20, 400)] + [
                chance.randrange(250) for _ in range(chance.randrange(9))
            ]
            claims = index.match(TokenPrompt(tokens=pack(tokens)))
            call = stub.Generate(request(f"r{number}", tokens))
            done = await finish(call)
            engine = dict(await call.trailing_metadata())["x-npufleet-engine"]
            assert done.cached_tokens == claims.get(engine, 0), number
            hits += done.cached_tokens > 0
            if number % 10 == 9:
                index = await settled(router)
            else:
                await asyncio.sleep(0.1)
        assert hits > 12


async def test_a_late_subscriber_learns_the_whole_cache(engines):
    async with grpc.aio.insecure_channel(engines[0]) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        tokens = [(7 * at) % 250 for at in range(300)]
        await finish(stub.Generate(request("late", tokens)))
        index = PrefixIndex()
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        batch = await call.read()
        assert batch.HasField("snapshot") and batch.events[0].HasField("cleared")
        while True:
            apply(index, "e", batch)
            if batch.snapshot.index + 1 >= batch.snapshot.count:
                break
            batch = await call.read()
        assert index.match(TokenPrompt(tokens=pack([*tokens, 1]))) == {"e": 288}, "18 blocks of 16 are full"
        assert index.orphans == 0
        loads = [load_of(await call.read()) for _ in range(3)]
        assert any(load is not None for load in loads)
        call.cancel()


async def test_a_cursor_is_refused_and_a_flush_empties_the_index(engines):
    async with routed(engines) as (router, stub):
        tokens = [(11 * at) % 250 for at in range(200)]
        await finish(stub.Generate(request("flush", tokens)))
        index = await settled(router)
        assert index.blocks
        async with grpc.aio.insecure_channel(engines[0]) as channel:
            one = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await one.SubscribeKvEvents(
                    common_pb2.SubscribeKvEventsRequest(start_sequence_number=5)
                ).read()
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        answer = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
        assert answer.success, answer.message
        # vLLM publishes the clearing with the next step that it makes.
        for address in engines:
            async with grpc.aio.insecure_channel(address) as channel:
                await finish(
                    vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request("next", [1, 2, 3]))
                )
        await until(lambda: index.blocks == 0, 10)
