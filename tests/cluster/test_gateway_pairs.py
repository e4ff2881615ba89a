"""The gateway's own attempts where two engines have to do with one request: hedges, and prompts computed apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.sampling_params import RequestOutputKind, SamplingParams

from npufleet.cluster.gateway.metrics import GatewayMetrics
from npufleet.cluster.gateway.settings import GatewaySettings
from npufleet.cluster.gateway.transport import GrpcEngineCore
from npufleet.cluster.router.hedge import HedgeSettings

from .router_fakes import MODEL, QUICK, FakeEngine, Fleet, fleet, until
from .test_gateway_translate import core_request

ANSWER = [5, 6, 7]


@dataclass(eq=False)
class WholeEngine(FakeEngine):
    """Answers in one piece, after ``delay``."""

    async def Generate(self, request, context):
        self.seen.append(request)
        me = len(self.seen)
        self.running.add(me)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.running.discard(me)
        done = pb.GenerateComplete(finish_reason="length", output_ids=ANSWER, completion_tokens=len(ANSWER))
        if "do_remote_decode" in request.kv_transfer_params_json:
            done.kv_transfer_params_json = '{"remote_engine_id": "p"}'
        yield pb.GenerateResponse(complete=done)


@asynccontextmanager
async def gateway(*engines: FakeEngine, **settings) -> AsyncIterator[tuple[Fleet, GrpcEngineCore]]:
    async with fleet(*engines, settings=replace(QUICK, **settings)) as f:
        made = GrpcEngineCore(MODEL, f.router.picker, GatewaySettings(), GatewayMetrics(), max_model_len=4096)
        made.attach(lambda request_id, error: None, lambda request: None)
        try:
            yield f, made
        finally:
            made.shutdown()


async def ask(core: GrpcEngineCore, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True)
    await core.add_request_async(core_request(params, prompt))
    async with asyncio.timeout(20):
        outputs = (await core.get_output_async()).outputs
    return [token for output in outputs for token in output.new_token_ids]


async def test_the_quicker_of_two_engines_answers_once() -> None:
    slow, quick = WholeEngine(name="a", delay=60.0), WholeEngine(name="b")
    async with gateway(slow, quick, hedging=HedgeSettings(max_tokens=8)) as (f, core):
        for _ in range(40):
            f.router.picker.hedges.learn(MODEL, 0.01)
        assert [await ask(core, [1, 2, 3]) for _ in range(3)] == [ANSWER] * 3
        await until(lambda: not slow.running)
        assert slow.seen and f.metric("npufleet_router_hedges_total", model=MODEL, outcome="won") == len(
            slow.seen
        )
        await until(lambda: all(member.in_flight == 0 for member in f.router.picker.pool.members()))


async def test_a_long_prompt_is_computed_apart() -> None:
    first = WholeEngine(name="p", role="prefill", connector="NixlConnector")
    second = WholeEngine(name="d", role="decode", connector="NixlConnector")
    async with gateway(first, second, split_tokens=100) as (f, core):
        assert await ask(core, list(range(1, 201))) == ANSWER
        assert await ask(core, [1, 2, 3]) == ANSWER
        assert [seen.sampling_params.max_tokens for seen in first.seen] == [1]
        assert [seen.kv_transfer_params_json for seen in second.seen] == ['{"remote_engine_id": "p"}', ""]
        await until(lambda: all(member.in_flight == 0 for member in f.router.picker.pool.members()))
