"""Lookaside routing: the router names an engine and signs for it, the engine looks, the accounts end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import jwt
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.engine.guard import Guard
from npufleet.cluster.engine.service import EngineServer, serve_engine
from npufleet.cluster.proto import lookaside_pb2
from npufleet.cluster.proto.extension import EXTENSION_KEY, decode
from npufleet.cluster.router.lookaside.tokens import TokenError, TokenMint, check_token, read_secret
from tests.fakes.async_llm import FakeAsyncLLM

from .router_fakes import MODEL, QUICK, FakeEngine, ListSource, fleet, generate_request, tokens_of, until

Code = grpc.StatusCode
SECRET = b"a secret of thirty-two bytes ...."
SIGNED = replace(QUICK, secret=SECRET)
Event = lookaside_pb2.ReportRequest


class Client:
    """A lookaside client of a router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        kinds = lookaside_pb2
        self.route = channel.unary_unary(
            "/npufleet.Lookaside/Route",
            kinds.RouteRequest.SerializeToString,
            kinds.RouteResponse.FromString,
        )
        self.report = channel.unary_unary(
            "/npufleet.Lookaside/Report",
            kinds.ReportRequest.SerializeToString,
            kinds.ReportResponse.FromString,
        )


def ask(**fields) -> lookaside_pb2.RouteRequest:
    return lookaside_pb2.RouteRequest(request_id="mine", token_ids=[1, 2, 3], **fields)


async def code_of(awaitable) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code()


@asynccontextmanager
async def guarded(*names: str) -> AsyncIterator[list[EngineServer]]:
    """Real engine services over fake engines, each with a guard."""
    servers = [await serve_engine(FakeAsyncLLM(), guard=Guard(SECRET, name)) for name in names]
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


def source_of(names: str, servers: list[EngineServer]) -> ListSource:
    return ListSource(
        *(
            EngineEndpoint(
                engine_id=name, model=MODEL, address=s.address, metrics_url="", state=EngineState.READY
            )
            for name, s in zip(names, servers, strict=True)
        )
    )


def direct(address: str):
    channel = grpc.aio.insecure_channel(address)
    return channel, vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def generate(address: str, token: str | None) -> list[int]:
    channel, stub = direct(address)
    async with channel:
        metadata = () if token is None else (("x-npufleet-token", token),)
        return await tokens_of(stub.Generate(generate_request(3), metadata=metadata))


async def test_a_client_streams_from_the_engine_that_the_router_named():
    async with guarded("a", "b") as servers, fleet(source=source_of("ab", servers), settings=SIGNED) as f:
        client = Client(f.channel)
        for name, server in zip("ab", servers, strict=True):
            route = await client.route(ask())
            assert (route.engine_id, route.address) == (name, server.address)
            assert await generate(route.address, route.token) == [10, 11, 12]
        # the router's own calls are signed too
        assert await tokens_of(f.stub.Generate(generate_request(3))) == [10, 11, 12]


async def test_an_engine_with_a_secret_refuses_what_the_router_did_not_sign():
    mint = TokenMint(SECRET)
    async with guarded("a") as (server,):
        good = mint.route("a", "r1", 30)
        head, claims, _ = good.split(".")
        no_signature = jwt.encode({"aud": "a", "exp": 2e9, "iss": "npufleet-router"}, None, algorithm="none")
        for token, code in (
            (None, Code.UNAUTHENTICATED),
            ("", Code.UNAUTHENTICATED),
            ("garbage", Code.UNAUTHENTICATED),
            (f"{head}.{claims}.{good[-8:]}", Code.UNAUTHENTICATED),
            (no_signature, Code.UNAUTHENTICATED),
            (TokenMint(b"another secret of thirty-two byte").route("a", "r2", 30), Code.UNAUTHENTICATED),
            (mint.route("a", "r3", -10), Code.UNAUTHENTICATED),
            (mint.route("b", "r4", 30), Code.PERMISSION_DENIED),
        ):
            assert await code_of(generate(server.address, token)) is code, token
        assert await generate(server.address, good) == [10, 11, 12]
        assert await code_of(generate(server.address, good)) is Code.UNAUTHENTICATED  # once is all


async def test_a_routes_token_opens_no_administration_and_descriptions_need_none():
    async with guarded("a") as (server,):
        channel, stub = direct(server.address)
        async with channel:
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            own = (("x-npufleet-token", TokenMint(SECRET).route("a", "r1", 30)),)
            assert await code_of(stub.FlushCache(common_pb2.FlushCacheRequest())) is Code.UNAUTHENTICATED
            flush = stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=own)
            assert await code_of(flush) is Code.PERMISSION_DENIED
            await stub.Abort(pb.AbortRequest(request_ids=["x"]), metadata=own)


async def test_a_route_counts_until_it_is_reported():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        client, load = Client(f.channel), f.router.picker.pool.member("a").ledgers[0].share
        route = await client.route(ask())
        assert (route.token, route.token_seconds) == ("", 0.0)  # no secret, no token
        assert (load().in_flight, load().queued, load().queued_tokens) == (1, 1, 3)
        await client.report(Event(route_id=route.route_id, event=Event.STARTED))
        assert (load().in_flight, load().queued) == (1, 0)
        await client.report(Event(route_id=route.route_id, event=Event.ENDED, grpc_code=0))
        assert load().in_flight == 0
        again = client.report(Event(route_id=route.route_id, event=Event.ENDED))
        assert await code_of(again) is Code.NOT_FOUND
        assert await code_of(client.report(Event(route_id="x"))) is Code.INVALID_ARGUMENT
        labels = {"model": MODEL, "method": "Generate", "outcome": "ok", "code": "OK"}
        assert f.metric("npufleet_router_requests_total", **labels) == 1


async def test_a_route_that_nobody_reports_expires():
    async with fleet(FakeEngine(name="a")) as f:
        away, load = f.router.front.away, f.router.picker.pool.member("a").ledgers[0].share
        route = await Client(f.channel).route(ask(timeout_seconds=0.5))
        assert route.accounted_seconds == 0.5
        assert load().in_flight == 1 and away.sweep() == 0
        away.get(route.route_id).until = 0.0  # its time has come
        assert away.sweep() == 1
        assert load().in_flight == 0
        assert f.router.picker.models() == {MODEL: 1}


async def test_a_clients_word_against_an_engine_is_looked_into_first():
    async with fleet(FakeEngine(name="a")) as f:
        client = Client(f.channel)
        route = await client.route(ask())
        code = Code.UNAVAILABLE.value[0]
        await client.report(Event(route_id=route.route_id, event=Event.ENDED, grpc_code=code))
        assert f.router.picker.models() == {MODEL: 1}
        assert f.metric("npufleet_router_ejections_total", model=MODEL) == 0


async def test_what_the_front_refuses_route_refuses_too():
    async with fleet(FakeEngine(name="a")) as f:
        client = Client(f.channel)
        assert await code_of(client.route(ask(model="nope"))) is Code.NOT_FOUND
        assert await code_of(client.route(ask(excluded=["a"]))) is Code.UNAVAILABLE
        assert await code_of(client.route(ask(timeout_seconds=-1))) is Code.INVALID_ARGUMENT
        f.source.put()
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        assert await code_of(client.route(ask())) is Code.UNAVAILABLE


async def test_an_abort_finds_a_routed_request():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        await Client(f.channel).route(ask())
        await f.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        assert engine.aborted == ["mine"]


def test_the_routers_own_token_is_renewed_in_time_and_is_no_routes():
    now = [1000.0]
    mint = TokenMint(SECRET, clock=lambda: now[0])
    first = mint.fleet()
    now[0] += 20
    assert mint.fleet() == first
    now[0] += 20
    assert mint.fleet() != first
    fresh = TokenMint(SECRET)
    assert check_token(fresh.fleet(), SECRET, "any").route is None
    assert check_token(fresh.route("a", "r", 5), SECRET, "a").route == "r"
    unnamed = jwt.encode({"aud": "a", "exp": 4e9, "iss": "npufleet-router"}, SECRET, algorithm="HS256")
    with pytest.raises(TokenError, match="names no route"):
        check_token(unnamed, SECRET, "a")


def test_a_secret_must_be_there_and_long(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_secret(tmp_path / "none")
    short = tmp_path / "short"
    short.write_text("short\n")
    with pytest.raises(ValueError, match="has 5 bytes; at least 32"):
        read_secret(short)


async def route_to_a_pair(f, **more) -> lookaside_pb2.RouteResponse:
    asked = lookaside_pb2.RouteRequest(request_id="r", token_ids=range(200), **more)
    return await Client(f.channel).route(asked)


def pair() -> tuple[FakeEngine, FakeEngine]:
    return (
        FakeEngine(name="p", role="prefill", connector="NixlConnector"),
        FakeEngine(name="d", role="decode", connector="NixlConnector"),
    )


async def test_a_client_that_passes_parameters_on_gets_a_pair():
    first, second = pair()
    async with fleet(first, second, settings=replace(QUICK, split_tokens=100)) as f:
        told = await route_to_a_pair(f, split=True, cache_salt="s")
        assert (told.engine_id, json.loads(told.kv_transfer_params_json)["remote_engine_id"]) == ("d", "p")
        (computed,) = first.seen
        assert list(computed.tokenized.input_ids) == list(range(200))
        assert computed.sampling_params.max_tokens == 1
        assert decode(first.metadata[0][EXTENSION_KEY]) == {"cache_salt": "s"}
        assert not second.seen, "the client goes there itself"
        members = {m.engine_id: m for m in f.router.picker.pool.members()}
        assert (members["p"].in_flight, members["d"].in_flight) == (0, 1)


async def test_who_does_not_ask_for_a_pair_gets_one_engine_that_decodes():
    first, second = pair()
    async with fleet(first, second, settings=replace(QUICK, split_tokens=100)) as f:
        told = await route_to_a_pair(f)
        assert told.engine_id == "d" and not told.HasField("kv_transfer_params_json") and not first.seen


async def test_a_client_that_leaves_while_its_prompt_is_computed_leaves_nothing():
    first, second = pair()
    first.delay = 60
    async with fleet(first, second, settings=replace(QUICK, split_tokens=100)) as f:
        asking = asyncio.create_task(route_to_a_pair(f, split=True))
        await until(lambda: first.seen)
        asking.cancel()
        await until(lambda: first.cancelled == ["r"])
        await until(lambda: all(m.in_flight == 0 for m in f.router.picker.pool.members()))
