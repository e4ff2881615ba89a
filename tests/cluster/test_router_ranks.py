"""Data-parallel ranks as endpoints: each has loads, cached blocks and requests of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_servicer.vllm import servicer

from npufleet.cluster.engine.service_rpc import _rank_wished
from npufleet.cluster.proto import lookaside_pb2
from npufleet.cluster.proto.extension import RANK_KEY
from npufleet.cluster.router.wire import with_rank

from .router_fakes import FakeEngine, endpoint, fleet, generate_request, tokens_of, until

BLOCK = 16


def ranks_of(engine: FakeEngine) -> Counter[int | None]:
    return Counter(
        seen.data_parallel_rank if seen.HasField("data_parallel_rank") else None for seen in engine.seen
    )


def stored(rank: int, number: int, tokens: list[int]) -> common_pb2.KvEventBatch:
    blocks = [
        common_pb2.KvBlock(block_hash=start + 1, token_ids=tokens[start : start + BLOCK], block_size=BLOCK)
        for start in range(0, len(tokens), BLOCK)
    ]
    event = common_pb2.KvCacheEvent(stored=common_pb2.KvBlocksStored(blocks=blocks))
    return common_pb2.KvEventBatch(sequence_number=number, dp_rank=rank, events=[event])


def test_the_rank_is_written_over_the_clients_own() -> None:
    raw = generate_request().SerializeToString()
    assert with_rank(raw, None) == raw
    assert not pb.GenerateRequest.FromString(raw).HasField("data_parallel_rank")
    for own in (raw, with_rank(raw, 7)):
        written = pb.GenerateRequest.FromString(with_rank(own, 300))
        assert written.data_parallel_rank == 300
        written.ClearField("data_parallel_rank")
        assert written == generate_request()


async def test_requests_are_spread_over_ranks_and_an_engine_that_is_not_split_is_told_none() -> None:
    wide, plain = FakeEngine(name="wide", ranks=3), FakeEngine(name="plain")
    async with fleet(wide, plain) as f:
        for _ in range(8):
            asked = generate_request()
            asked.data_parallel_rank = 2  # a client knows nothing of ranks behind a router
            await tokens_of(f.stub.Generate(asked))
        assert ranks_of(wide) == {0: 2, 1: 2, 2: 2}
        assert len(plain.seen) == 2
        answer = await f.stub.Embed(
            pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[1]))
        )
        assert answer.embedding == [1.0]


async def test_each_rank_has_a_load_of_its_own() -> None:
    engine = FakeEngine(name="wide", ranks=2)
    engine.loads = [
        pb.SchedulerLoad(dp_rank=0, num_running_reqs=1, num_waiting_reqs=4, num_waiting_uncached_tokens=9000),
        pb.SchedulerLoad(dp_rank=1, num_running_reqs=2),
        pb.SchedulerLoad(dp_rank=5, num_running_reqs=99),  # none that this engine has
    ]
    async with fleet(engine, policy="least-load") as f:
        (member,) = f.router.picker.pool.members()
        await until(lambda: all(load.report is not None for load in member.loads()))
        assert [load.requests() for load in member.loads()] == [5, 2]
        for _ in range(3):
            await tokens_of(f.stub.Generate(generate_request()))
        assert ranks_of(engine) == {1: 3}
        assert f.metric("npufleet_router_picks_total", model="tiny", engine="wide") == 3


async def test_a_request_goes_to_the_rank_that_holds_its_prompt() -> None:
    engine = FakeEngine(name="wide", ranks=4, events=asyncio.Queue())
    prompt = list(range(8 * BLOCK))
    async with fleet(engine, policy="predicted-ttft") as f:
        engine.events.put_nowait(stored(2, 0, prompt))
        index = f.router.picker.decider.index("tiny")
        await until(lambda: index.engine_blocks("wide#2") == 8)
        await tokens_of(f.stub.Generate(generate_request(prompt=(*prompt, 1))))
        assert ranks_of(engine) == {2: 1}
        assert f.metric("npufleet_router_engine_prefix_blocks", model="tiny", engine="wide") == 8
        f.source.put()  # it leaves: nothing of its ranks may be left
        await until(lambda: not index.engine_blocks("wide#2"))
        assert index.blocks == 0


async def test_a_stream_of_requests_fills_all_ranks_when_one_session_sticks_to_its_own() -> None:
    engine = FakeEngine(name="wide", ranks=2)
    async with fleet(engine, policy="sticky-session") as f:
        for _ in range(4):
            call = f.stub.Generate(generate_request(), metadata=(("x-npufleet-session", "one"),))
            await tokens_of(call)
        assert len(ranks_of(engine)) == 1


async def test_an_engine_that_is_split_in_another_way_is_another_engine() -> None:
    engine = FakeEngine(name="wide", ranks=2)
    async with fleet(engine) as f:
        f.source.put(replace(endpoint(engine), ranks=3))
        await until(lambda: [len(m.ledgers) for m in f.router.picker.pool.members()] == [3])


async def test_a_lookaside_client_is_told_the_rank() -> None:
    engine = FakeEngine(name="wide", ranks=2)
    async with fleet(engine) as f:
        route = f.channel.unary_unary(
            "/npufleet.Lookaside/Route",
            lookaside_pb2.RouteRequest.SerializeToString,
            lookaside_pb2.RouteResponse.FromString,
        )
        told = [await route(lookaside_pb2.RouteRequest(prompt_tokens=3)) for _ in range(2)]
        assert sorted(answer.data_parallel_rank for answer in told) == [0, 1]


@pytest.mark.parametrize(
    ("said", "ranks", "wished"),
    [("1", 2, 1), ("2", 2, None), ("0", 1, None), ("-1", 2, None), ("x", 2, None)],
)
def test_a_router_that_cannot_write_into_the_request_names_the_rank_beside_it(
    said: str, ranks: int, wished: int | None
) -> None:
    assert _rank_wished([("other", "1"), (RANK_KEY, said)], ranks) == wished


def test_the_stock_servicer_takes_the_rank() -> None:
    """The router relies on it for engines that are not ours."""
    assert servicer.VllmEngineServicer.Generate.__code__.co_names.count("data_parallel_rank")
