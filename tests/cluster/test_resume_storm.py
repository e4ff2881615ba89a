"""Hundreds of streams over engines that fail, hang and refuse at any token, with clients that leave: no wrong token,
and nothing is left of any of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput

from npufleet.cluster.router import member

from .router_fakes import MODEL, QUICK, Fleet, fleet, until
from .test_gateway_resume import gateway
from .test_gateway_translate import core_request
from .test_router_resume import PROMPT, Chain, ask, idle, next_token

pytestmark = pytest.mark.slow
Code = grpc.StatusCode
LOSSES = (Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS, Code.ABORTED)
END = 9  # the frontend's end token
LONGEST = 12  # tokens before it
MANY, AT_ONCE = 400, 8


@dataclass(eq=False)
class Wild(Chain):
    """Fails, hangs and refuses by chance."""

    chance: random.Random = field(default_factory=random.Random)
    end: tuple[int, int] = (len(PROMPT) + LONGEST, END)
    eos: tuple[int, ...] = (END,)
    hanging: int = 0

    async def _break_at(self, where: int | str, context) -> None:
        if self.chance.random() < 0.05:
            await asyncio.sleep(self.chance.random() / 100)
        fate = self.chance.random()
        if fate < 0.05:
            await context.abort(self.chance.choice(LOSSES), "it is gone")
        if fate < 0.07 and where == len(self.seen[-1].tokenized.input_ids):
            await context.abort(self.chance.choice((Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)), "no")
        if fate < 0.08:
            self.hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.hanging -= 1


def answer(limit: int) -> tuple[list[int], str]:
    """What the model says to PROMPT, and why it ends."""
    ids = list(PROMPT)
    while len(ids) - len(PROMPT) < min(limit, LONGEST):
        ids.append(next_token(ids))
    said = ids[len(PROMPT) :]
    return (said, "length") if limit <= LONGEST else ([*said, END], "stop")


async def some_ready(f: Fleet) -> None:
    await until(lambda: any(each.pickable for each in f.router.picker.pool.members()), 30)


@asynccontextmanager
async def watched(f: Fleet) -> AsyncIterator[asyncio.Semaphore]:
    """Drop the links of engines that hang, as the router does after a while; at the end nothing is left."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.02)
            for each in f.router.picker.pool.members():
                if any(engine.hanging and engine.name == each.engine_id for engine in f.engines):
                    each.channel.drop("it hangs")

    watching = asyncio.create_task(watch())
    yield asyncio.Semaphore(AT_ONCE)
    await idle(f)
    watching.cancel()
    ledgers = [ledger for each in f.router.picker.pool.members() for ledger in each.ledgers]
    assert all(ledger.in_flight == ledger.queued == ledger.queued_tokens == 0 for ledger in ledgers)
    assert f.metric("npufleet_router_in_flight", model=MODEL) == 0


@pytest.fixture(autouse=True)
def believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_LONGEST_HOLD", 0.05)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("front", ["http2", "grpcio"])
async def test_streams_of_the_front(front: str, transport: str):
    chance = random.Random(f"{front} {transport}")
    whole = 0

    async def one(f: Fleet, turn: asyncio.Semaphore, number: int) -> None:
        nonlocal whole
        limit = chance.randint(1, LONGEST + 4)
        said, reason = answer(limit)
        request = ask(limit, logprobs=1)
        request.request_id = f"r{number}"
        leaves_after = chance.randint(0, LONGEST) if chance.random() < 0.2 else None
        got: list[int] = []
        ends: list[pb.GenerateComplete] = []
        async with turn:
            await some_ready(f)
            call = f.stub.Generate(request, timeout=30)
            try:
                while leaves_after is None or len(got) < leaves_after:
                    message = await call.read()
                    if message is grpc.aio.EOF:
                        assert (got, [end.finish_reason for end in ends]) == (said, [reason])
                        whole += 1
                        break
                    part = message.chunk if message.HasField("chunk") else message.complete
                    assert part.prompt_tokens == len(PROMPT) and not ends
                    got += message.chunk.token_ids
                    ends += [message.complete] if message.HasField("complete") else []
                else:
                    if chance.random() < 0.5:
                        await f.stub.Abort(pb.AbortRequest(request_ids=[request.request_id]))
            except grpc.aio.AioRpcError:
                assert got == said[: len(got)]
            call.cancel()

    wild = [Wild(name=name, chance=chance) for name in "abcd"]
    settings = replace(QUICK, front=front, transport=transport, breaker_failures=1000)
    async with fleet(*wild, settings=settings) as f, watched(f) as turn:
        await asyncio.gather(*(one(f, turn, number) for number in range(MANY)))
    assert whole > MANY / 4


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_requests_of_the_gateway(transport: str):
    chance = random.Random(transport)
    outputs: dict[str, list[EngineCoreOutput]] = {}
    errors: dict[str, VLLMError] = {}
    whole = 0
    wild = [Wild(name=name, chance=chance) for name in "abcd"]
    async with gateway(*wild, transport=transport, breaker_failures=1000) as g, watched(g.fleet) as turn:
        core = g.core
        core.attach(errors.__setitem__, lambda request: outputs[request.request_id].clear())

        async def frontend() -> None:
            while True:
                for output in (await core.get_output_async()).outputs:
                    outputs[output.request_id].append(output)

        async def one(number: int) -> None:
            nonlocal whole
            name, limit = f"r{number}", chance.randint(1, LONGEST + 4)
            said, reason = answer(limit)
            more = {"output_kind": RequestOutputKind.DELTA}
            if chance.random() < 0.2:
                more = {"output_kind": RequestOutputKind.FINAL_ONLY, "stop": ["z"]}
            request = core_request(SamplingParams(temperature=0.0, max_tokens=limit, **more), list(PROMPT))
            request.request_id = name
            outputs[name] = []
            async with turn:
                await some_ready(g.fleet)
                await core.add_request_async(request)
                if leaves := chance.random() < 0.15:
                    await asyncio.sleep(chance.random() / 10)
                    await core.abort_requests_async([name])
                await until(lambda: name not in core._jobs, 30)
            await until(lambda: not core._outputs)
            got = [token for output in outputs[name] for token in output.new_token_ids]
            ends = [str(each.finish_reason) for each in outputs[name] if each.finish_reason is not None]
            assert got == said[: len(got)]
            if name not in errors and not leaves:
                assert (got, ends) == (said, [reason])
                whole += 1
            assert not (ends and name in errors)

        reading = asyncio.create_task(frontend())
        await asyncio.gather(*(one(number) for number in range(MANY)))
        reading.cancel()
    assert whole > MANY / 4
