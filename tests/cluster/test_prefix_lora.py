"""The prefix index beside vLLM's KV-cache manager where requests name adapters and salts.

The plugin takes no adapters, so the engine is a simulated one: scheduler, block hashes, prefix cache and KV events are
vLLM's own, and none of its blocks may count for another adapter or another salt.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.engine.service import serve_engine
from npufleet.cluster.proto.extension import EXTENSION_KEY, encode
from npufleet.cluster.router.prefix.prompt import TokenPrompt, pack
from npufleet.cluster.router.server import serve_router
from npufleet.cluster.sim import tokenizer
from npufleet.cluster.sim.timing import DeviceTime

from .router_fakes import QUICK, ListSource, until
from .test_prefix_real import quiet

pytestmark = pytest.mark.slow
BLOCK = 16
QUICK_DEVICE = DeviceTime(base=1e-3, weights=0, token=1e-6, pair=0, context=0, kv_tokens=4096)


def engine(folder: Path):
    from vllm.config import LoRAConfig
    from vllm.config.kv_events import KVEventsConfig

    from npufleet.cluster.sim.engine import SimEngine
    from npufleet.cluster.sim.scheduler import engine_config

    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )
    model = tokenizer.write(folder / "model", 1024)
    config = engine_config(model, QUICK_DEVICE, BLOCK, max_model_len=1024, events=events)
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=4)
    return SimEngine(config, QUICK_DEVICE)


async def ask(stub, name: str, tokens: list[int], lora: str, salt: str) -> int:
    """The prompt tokens that the engine had in its cache."""
    fields: dict[str, object] = {"cache_salt": salt} if salt else {}
    if lora:
        fields["lora"] = {"name": lora, "id": "abc".index(lora) + 1, "path": f"/adapters/{lora}"}
    extension = encode(fields)
    request = pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=tokens),
        sampling_params=pb.SamplingParams(max_tokens=2, ignore_eos=True),
        stream=True,
    )
    metadata = () if extension is None else ((EXTENSION_KEY, extension),)
    answers = [answer async for answer in stub.Generate(request, metadata=metadata, timeout=60)]
    return answers[-1].complete.cached_tokens


async def test_index_and_engine_agree_for_adapters_and_salts(tmp_path: Path):
    chance = random.Random(3)
    llm = engine(tmp_path)
    server = await serve_engine(llm)
    endpoint = EngineEndpoint(
        engine_id="sim", model="sim", address=server.address, metrics_url="", state=EngineState.READY
    )
    router = await serve_router(ListSource(endpoint), settings=QUICK)
    try:
        await router.wait_ready(20)
        await until(lambda: len(router.picker.events.following) == 1, 20)
        index = router.picker.decider.index("sim")
        stems = [[chance.randrange(250) for _ in range(200)] for _ in range(3)]
        hits = {True: 0, False: 0}
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            for number in range(200):
                stem = chance.choice(stems)[: chance.randrange(20, 200)]
                tokens = [*stem, *(chance.randrange(250) for _ in range(chance.randrange(1, 20)))]
                lora, salt = chance.choice(["", "", "a", "b", "c"]), chance.choice(["", "", "tenant"])
                prompt = TokenPrompt(tokens=pack(tokens), lora=lora, salt=salt)
                said = index.match(prompt).get("sim", 0)
                cached = await ask(stub, f"r{number}", tokens, lora, salt)
                assert cached == said, f"request {number} ({lora!r}, {salt!r}): index {said}, engine {cached}"
                hits[bool(lora)] += cached > 0
                await until(lambda: router.picker.pool.members()[0].ledgers[0].in_flight == 0, 20)
                if number % 25 == 24:
                    await quiet(index, "sim")
                else:
                    await asyncio.sleep(0.1)  # the events of the last step are on their way
        assert min(hits.values()) > 30 and index.orphans == 0
    finally:
        await router.close(0.0)
        await server.stop()
        llm.shutdown()
