"""What the index says of a real engine's cache and what that engine then finds, over hundreds of mixed requests."""

from __future__ import annotations

import asyncio
import random

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.proto.extension import EXTENSION_KEY, encode
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.prompt import TokenPrompt, pack

from .real_engine import BLOCK, BLOCKS, Engine, routed
from .router_fakes import until

pytestmark = pytest.mark.slow


def salted(salt: str) -> tuple[tuple[str, bytes], ...] | None:
    if not salt:
        return None
    extension = encode({"cache_salt": salt})
    assert extension is not None
    return ((EXTENSION_KEY, extension),)


async def ask(
    stub: vllm_engine_pb2_grpc.VllmEngineStub, name: str, tokens: list[int], salt: str, output: int
) -> int:
    """The prompt tokens that the engine had in its cache."""
    call = stub.Generate(
        pb.GenerateRequest(
            request_id=name,
            tokenized=pb.TokenizedInput(input_ids=tokens),
            sampling_params=pb.SamplingParams(max_tokens=output, ignore_eos=True),
            stream=True,
        ),
        metadata=salted(salt),
        timeout=120,
    )
    cached = -1
    async for answer in call:
        if answer.HasField("complete"):
            cached = answer.complete.cached_tokens
    return cached


async def quiet(index: PrefixIndex, engine_id: str) -> None:
    """Until nothing is expected any more and no event has come for a while."""
    nothing = TokenPrompt(tokens=b"")
    await until(lambda: (index.match(nothing), index.expected == 0)[1], 60)
    before = -1
    while before != index.engine_blocks(engine_id):
        before = index.engine_blocks(engine_id)
        await asyncio.sleep(0.3)


async def check(router, stub, engine_id: str, count: int, chance: random.Random) -> tuple[int, int]:
    """``count`` mixed requests; how many were checked against the index alone, and how many had a hit."""
    index = router.picker.decider.index("tiny")
    stems = [[chance.randrange(250) for _ in range(1500)] for _ in range(5)]
    hits = 0
    for number in range(count):
        stem = chance.choice(stems)
        tokens = stem[: chance.randrange(1, 1500)] + [
            chance.randrange(250) for _ in range(chance.randrange(1, 40))
        ]
        salt = chance.choice(["", "", "tenant"])
        said = index.match(TokenPrompt(tokens=pack(tokens), salt=salt)).get(engine_id, 0)
        cached = await ask(stub, f"{engine_id}-{number}", tokens, salt, chance.choice([1, 2, 140]))
        assert cached == said, f"request {number}: index {said}, engine {cached}"
        hits += cached > 0
        await until(lambda: router.picker.pool.members()[0].ledgers[0].in_flight == 0, 30)
        if number % 25 == 24:
            await quiet(index, engine_id)
        else:
            await asyncio.sleep(0.12)  # the events of the last step are on their way
    return count, hits


async def test_the_index_agrees_with_a_real_engine_across_eviction_and_restart(tmp_path):
    chance = random.Random(11)
    engine = Engine(tmp_path)
    async with routed(engine) as (router, source, stub):
        index = router.picker.decider.index("tiny")
        _, hits = await check(router, stub, "real-1", 300, chance)
        assert hits > 100 and index.engine_blocks("real-1") <= BLOCKS
        engine.kill()
        source.put(await asyncio.to_thread(engine.start))
        await until(lambda: router.picker.events.following == {"real-2"}, 60)
        assert index.engine_blocks("real-1") == 0 == index.engine_blocks("real-2")
        _, again = await check(router, stub, "real-2", 200, chance)
        assert again > 60 and index.orphans == 0
        assert BLOCK * BLOCKS < 300 * 700  # far more was sent than the cache holds
