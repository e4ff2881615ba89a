"""Both transports against a grpcio server: the same calls, the same ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from npufleet.cluster.transport.base import LinkSettings, Tls
from npufleet.cluster.transport.registry import known_transports, open_channel

from .certificates import Authority
from .router_fakes import FakeEngine, generate_request, tokens_of, until

Code = grpc.StatusCode
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


@pytest.fixture(params=known_transports())
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def engine():
    made = await FakeEngine(name="a").start()
    yield made
    await made.stop()


@pytest.fixture
async def channel(transport: str, engine: FakeEngine):
    made = open_channel(transport, engine.address)
    yield made
    await made.close()


async def error_of(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


async def test_generated_stubs_work(engine, channel):
    stub = pb_grpc.VllmEngineStub(channel)
    assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).model_path == "a"
    call = stub.Generate(generate_request(5), metadata=(("x-a-bin", b"\0\xff"), ("x-b", "text")))
    assert await tokens_of(call) == [6, 7, 8, 9, 10]
    assert dict(await call.initial_metadata())["x-fake"] == "a"
    assert dict(await call.trailing_metadata())["x-fake-done"] == "5"
    assert await call.code() is Code.OK and call.done()
    assert engine.metadata[0]["x-a-bin"] == b"\0\xff" and engine.metadata[0]["x-b"] == "text"


@pytest.mark.parametrize("size", [0, 1, 16_000, 70_000, 1_200_000])
async def test_bodies_of_every_size_arrive(engine, channel, size: int):
    prompt = tuple(range(size))
    raw = generate_request(1, prompt).SerializeToString()
    assert len([m async for m in channel.unary_stream(GENERATE)(raw)]) == 2
    assert engine.seen[0].SerializeToString() == raw


async def test_many_streams_at_once_keep_their_own_tokens(engine, channel):
    engine.delay = 0.001
    stub = pb_grpc.VllmEngineStub(channel)

    async def one(number: int) -> None:
        expected = [number + i for i in range(20)]
        assert await tokens_of(stub.Generate(generate_request(20, (number,), f"r{number}"))) == expected

    await asyncio.gather(*(one(number) for number in range(1, 200)))


async def test_messages_reach_a_callback_in_order(engine, channel):
    got: list[bytes] = []
    raw = generate_request(50).SerializeToString()
    call = channel.listen(GENERATE, raw, on_message=got.append, metadata=(), timeout=20)
    assert dict(await call)["x-fake-done"] == "50"
    direct = [m async for m in channel.unary_stream(GENERATE)(raw)]
    assert got == direct
    assert not call.cancel()


async def test_a_callback_that_fails_ends_its_call_alone(engine, channel):
    engine.delay = 0.01

    def refuse(message: bytes) -> None:
        raise ValueError("not mine")

    raw = generate_request(5, request_id="bad").SerializeToString()
    other = asyncio.create_task(tokens_of(pb_grpc.VllmEngineStub(channel).Generate(generate_request(5))))
    error = await error_of(channel.listen(GENERATE, raw, on_message=refuse, metadata=(), timeout=20))
    assert error.code() is Code.INTERNAL and "not mine" in error.details()
    await until(lambda: engine.cancelled == ["bad"])
    assert len(await other) == 5


async def test_an_engines_status_and_trailers_come_through(engine, channel):
    engine.fail_at, engine.fail_code = 2, Code.RESOURCE_EXHAUSTED
    call = pb_grpc.VllmEngineStub(channel).Generate(generate_request(5))
    error = await error_of(tokens_of(call))
    assert error.code() is Code.RESOURCE_EXHAUSTED and error.details() == "fake failure of a"
    missing = await error_of(channel.unary_unary("/none.Such/Method")(b""))
    assert missing.code() is Code.UNIMPLEMENTED


async def test_cancels_and_deadlines_reach_the_engine(engine, channel):
    engine.delay = 30
    stub = pb_grpc.VllmEngineStub(channel)
    call = stub.Generate(generate_request(5, request_id="cancelled"))
    reading = asyncio.create_task(call.read())
    await until(lambda: len(engine.seen) == 1)
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: engine.cancelled == ["cancelled"])
    late = await error_of(tokens_of(stub.Generate(generate_request(5, request_id="late"), timeout=0.2)))
    assert late.code() is Code.DEADLINE_EXCEEDED
    await until(lambda: engine.cancelled == ["cancelled", "late"])
    left = engine.time_left[1]
    assert left is not None and left < 0.3
    task = asyncio.create_task(tokens_of(stub.Generate(generate_request(5, request_id="task"))))
    await until(lambda: len(engine.seen) == 3)
    task.cancel()
    await until(lambda: engine.cancelled == ["cancelled", "late", "task"])


async def test_an_engine_that_is_away_fails_calls_at_once_and_is_found_again(transport):
    engine = await FakeEngine(name="a").start()
    channel = open_channel(transport, engine.address, LinkSettings(reconnect_backoff=0.1))
    stub = pb_grpc.VllmEngineStub(channel)
    running = aiter(stub.Generate(generate_request(10**6)))
    await anext(running)
    await engine.stop()
    assert (await error_of(tokens_of(running))).code() is Code.UNAVAILABLE
    assert (await error_of(tokens_of(stub.Generate(generate_request(1))))).code() is Code.UNAVAILABLE
    await engine.start()
    assert len(await tokens_of(stub.Generate(generate_request(3), wait_for_ready=True))) == 3
    await channel.close()
    await engine.stop()


async def test_states_are_those_of_grpc(transport, engine):
    channel = open_channel(transport, engine.address, LinkSettings(reconnect_backoff=0.1))
    State = grpc.ChannelConnectivity
    assert channel.get_state() is State.IDLE
    state = channel.get_state(True)
    while state is not State.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
    await engine.stop()
    await channel.wait_for_state_change(State.READY)
    assert channel.get_state() is not State.READY
    await channel.close()
    assert channel.get_state() is State.SHUTDOWN


async def test_close_cancels_what_runs(engine, transport):
    engine.delay = 30
    channel = open_channel(transport, engine.address)
    call = pb_grpc.VllmEngineStub(channel).Generate(generate_request(5))
    reading = asyncio.create_task(call.read())
    await until(lambda: engine.seen)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: engine.cancelled == ["r"])


async def test_metadata_above_the_peers_limit_is_refused(transport, engine):
    channel = open_channel(transport, engine.address)
    call = pb_grpc.VllmEngineStub(channel).Generate(generate_request(1), metadata=(("x", "v" * 40_000),))
    assert (await error_of(tokens_of(call))).code() is Code.RESOURCE_EXHAUSTED
    assert len(await tokens_of(pb_grpc.VllmEngineStub(channel).Generate(generate_request(1)))) == 1
    await channel.close()


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(transport: str, tmp_path: Path, mutual: bool):
    authority = Authority(tmp_path)
    server_pem, client_pem = authority.sign("engine.test"), authority.sign("router.test")
    engine = FakeEngine(name="a", credentials=(authority.ca, server_pem.certificate, server_pem.key, mutual))
    await engine.start()
    shown = {"certificate": client_pem.certificate, "key": client_pem.key} if mutual else {}
    tls = Tls(ca=authority.ca, server_name="engine.test", **shown)
    channel = open_channel(transport, engine.address, tls=tls)
    assert await tokens_of(pb_grpc.VllmEngineStub(channel).Generate(generate_request(2))) == [6, 7]
    await channel.close()
    stranger = Authority(tmp_path, "another authority")
    wrong = [Tls(ca=stranger.ca), Tls(ca=authority.ca, server_name="other.test")]
    if mutual:
        wrong.append(Tls(ca=authority.ca))
    for each in wrong:
        channel = open_channel(transport, engine.address, tls=each)
        error = await error_of(tokens_of(pb_grpc.VllmEngineStub(channel).Generate(generate_request(2))))
        assert error.code() is Code.UNAVAILABLE
        await channel.close()
    await engine.stop()


def test_what_cannot_be_is_said(tmp_path: Path):
    with pytest.raises(ValueError, match="did you mean 'http2'"):
        open_channel("http", "127.0.0.1:1")
    with pytest.raises(ValueError, match="not HOST:PORT"):
        open_channel("http2", "nowhere")
    with pytest.raises(ValueError, match="together"):
        Tls(key=tmp_path)
    for use in (Tls(ca=tmp_path / "none").context, Tls(ca=tmp_path / "none").credentials):
        with pytest.raises(ValueError, match="TLS files"):
            use()
    with pytest.raises(ValueError, match="keepalive_time must be above 0"):
        LinkSettings(keepalive_time=0)
