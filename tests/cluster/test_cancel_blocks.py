"""How soon a cancel frees a real engine's KV blocks, by the phase that the request is in.

With ``-s`` it prints the table. The engine runs on a virtual NPU; its own ``GetLoads`` says what it holds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import replace

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.admission.settings import AdmissionSettings

from .real_engine import Engine, router_before
from .router_fakes import QUICK, until

pytestmark = pytest.mark.slow
SLOTS = 4
LENGTH, STEP = 16_384, 128  # a prompt of that length takes 128 steps of the engine, and never ends first
PROMPT = LENGTH - 1000
BLOCKS = 4 * LENGTH // 128
ROUNDS = 30
PHASES = ("on its way", "queued in the router", "queued in the engine", "silent prefill", "between tokens")


def request(name: str, prompt: int, output: int, chance: random.Random) -> pb.GenerateRequest:
    """One that shares no prefix with others."""
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=[chance.randrange(250) for _ in range(prompt)]),
        sampling_params=pb.SamplingParams(max_tokens=output, ignore_eos=True),
        stream=True,
    )


class Watch:
    """What the engine says of itself, asked of it without the router."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    async def load(self) -> pb.SchedulerLoad:
        return (await self._stub.GetLoads(pb.GetLoadsRequest())).loads[0]

    async def until(self, condition, seconds: float = 60.0) -> pb.SchedulerLoad:
        async with asyncio.timeout(seconds):
            while not condition(load := await self.load()):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
            return load


class Case:
    """One engine behind one router, and the time from a cancel to the end of what it cancels."""

    def __init__(self, router, stub: vllm_engine_pb2_grpc.VllmEngineStub, watch: Watch) -> None:
        self.router = router
        self.stub = stub
        self.watch = watch
        self.chance = random.Random(5)

    async def idle(self) -> None:
        await self.watch.until(
            lambda load: load.num_running_reqs == load.num_waiting_reqs == load.num_used_tokens == 0
        )

    async def once(self, phase: str, name: str) -> float:
        """Milliseconds until the engine holds what it held before, and the router nothing."""
        holders = await self.full(name) if phase.startswith("queued") else []
        before = await self.watch.load()
        ledger = self.router.picker.pool.members()[0].ledgers[0]
        prompt = 20 if phase == "between tokens" else PROMPT
        call = self.stub.Generate(request(name, prompt, 800, self.chance))
        reading = asyncio.create_task(call.read())
        await self.reach(phase, call, reading, before)
        start = time.perf_counter()
        call.cancel()
        await self.watch.until(
            lambda load: (
                load.num_running_reqs == len(holders)
                and not load.num_waiting_reqs
                and (bool(holders) or not load.num_used_tokens)
                and ledger.in_flight == len(holders)
            )
        )
        took = (time.perf_counter() - start) * 1000
        for each in holders:
            each.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await self.idle()
        return took

    async def reach(self, phase: str, call, reading: asyncio.Task, before: pb.SchedulerLoad) -> None:
        """Until the call is in ``phase``, at a random moment of it."""
        if phase == "on its way":
            await asyncio.sleep(self.chance.uniform(0, 0.02))
        elif phase == "queued in the router":
            await until(lambda: self.router.picker.gate.waiting("tiny") == 1)
        elif phase == "queued in the engine":
            await self.watch.until(lambda load: load.num_waiting_reqs == 1)
        elif phase == "silent prefill":
            await self.watch.until(lambda load: load.num_used_tokens > before.num_used_tokens)
            await asyncio.sleep(self.chance.uniform(0, 0.1))
            assert not reading.done(), "the prefill is over"
        else:
            await reading
            for _ in range(self.chance.randrange(1, 20)):
                await call.read()

    async def full(self, name: str) -> list:
        """As many requests as the engine runs at once."""
        calls = [self.stub.Generate(request(f"{name}-{at}", 20, 800, self.chance)) for at in range(SLOTS)]
        await asyncio.gather(*(call.read() for call in calls))
        return calls


async def test_a_cancel_frees_the_blocks_of_a_real_engine(tmp_path):
    engine = Engine(
        tmp_path,
        max_model_len=LENGTH,
        max_num_batched_tokens=STEP,
        max_num_seqs=SLOTS,
        num_gpu_blocks_override=BLOCKS,
    )
    endpoint = await asyncio.to_thread(engine.start)
    watch = Watch(engine.address)
    print("\n| phase | median ms | worst ms |\n|---|---|---|")
    few = replace(QUICK, admission=AdmissionSettings(engine_slots=SLOTS))
    try:
        for phase in PHASES:
            settings = few if phase == "queued in the router" else QUICK
            async with router_before(endpoint, settings) as (router, _, stub):
                case = Case(router, stub, watch)
                took = [await case.once(phase, f"{phase} {number}") for number in range(ROUNDS)]
            print(f"| {phase} | {statistics.median(took):.1f} | {max(took):.1f} |", flush=True)
            assert statistics.median(took) < 500, phase  # ms; other work on the machine included
    finally:
        await watch.channel.close()
        engine.kill()
