"""Generate and Embed through the router: the same bytes, the same ends, retries only before any output."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from npufleet.cluster.router.settings import RouterSettings

from .router_fakes import (
    MODEL,
    QUICK,
    FakeEngine,
    ListSource,
    endpoint,
    fleet,
    generate_request,
    tokens_of,
    until,
)

Code = grpc.StatusCode
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


async def raw_answers(channel: grpc.aio.Channel, request: bytes) -> list[bytes]:
    return [message async for message in channel.unary_stream(GENERATE)(request)]


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(call)
    return caught.value


async def test_the_stream_is_the_engines_own_bytes():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f, grpc.aio.insecure_channel(engine.address) as direct:
        for tokens, prompt in [(0, (5,)), (1, ()), (40, tuple(range(3000)))]:
            request = generate_request(tokens, prompt).SerializeToString()
            through = await raw_answers(f.channel, request)
            assert through == await raw_answers(direct, request)
            assert len(through) == tokens + 1


async def test_unknown_fields_reach_the_engine():
    """A newer client's field, which this router's messages do not know, must not be lost on the way."""
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        raw = generate_request().SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, bytes
        await raw_answers(f.channel, raw)
        assert engine.seen[0].SerializeToString().endswith(b"\xfa\x3f\x03new")


async def test_metadata_passes_both_ways():
    engine = FakeEngine(name="a")
    sent = {"x-npufleet-ext-bin": b"\x81\x00", "traceparent": "00-01-02-03", "x-npufleet-model": MODEL}
    async with fleet(engine) as f:
        call = f.stub.Generate(generate_request(), metadata=tuple(sent.items()))
        await tokens_of(call)
        got = engine.metadata[0]
        assert {key: got[key] for key in sent} == sent
        initial, trailing = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
        assert initial["x-fake"] == "a"
        assert trailing["x-fake-done"] == "4"
        assert trailing["x-npufleet-engine"] == "a"


async def test_the_clients_deadline_reaches_the_engine_and_ends_the_call():
    engine = FakeEngine(name="a", delay=30)
    async with fleet(engine) as f:
        error = await error_of(f.stub.Generate(generate_request(), timeout=0.5))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert engine.time_left[0] is not None and engine.time_left[0] < 0.6  # the wire rounds
        await until(lambda: engine.cancelled == ["r"])
        await until(lambda: f.router.picker.pool.member("a").in_flight == 0)
        assert f.router.picker.models() == {MODEL: 1}


async def test_a_call_without_deadline_gets_the_routers():
    engine = FakeEngine(name="a")
    async with fleet(engine, settings=RouterSettings(request_timeout=77)) as f:
        await tokens_of(f.stub.Generate(generate_request()))
        assert engine.time_left[0] is not None and 70 < engine.time_left[0] < 78


@pytest.mark.parametrize("read_first", [False, True])
async def test_a_cancelled_stream_is_cancelled_on_the_engine_in_its_silence(read_first: bool):
    engine = FakeEngine(name="a", delay=0.01 if read_first else 60)
    async with fleet(engine) as f:
        call = f.stub.Generate(generate_request(10_000))
        if read_first:
            await call.read()
            engine.delay = 60
            await asyncio.sleep(0.05)
        else:
            await until(lambda: engine.seen)
        call.cancel()
        await until(lambda: engine.cancelled == ["r"])
        await until(lambda: f.metric("npufleet_router_in_flight", model=MODEL) == 0)
        assert f.router.picker.pool.member("a").in_flight == 0


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.RESOURCE_EXHAUSTED])
async def test_an_engines_failure_before_output_is_retried_elsewhere(code: grpc.StatusCode):
    bad, good = FakeEngine(name="a", fail_at=0, fail_code=code), FakeEngine(name="b")
    async with fleet(bad, good) as f:
        for _ in range(4):
            assert await tokens_of(f.stub.Generate(generate_request(3))) == [6, 7, 8]
        assert bad.seen and len(good.seen) == 4
        assert f.metric("npufleet_router_retries_total", model=MODEL, code=code.name) == len(bad.seen)


@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION])
async def test_a_clients_fault_is_not_retried_and_ejects_nobody(code: grpc.StatusCode):
    engines = [FakeEngine(name=n, fail_at=0, fail_code=code) for n in "ab"]
    async with fleet(*engines) as f:
        for _ in range(10):
            error = await error_of(f.stub.Generate(generate_request()))
            assert error.code() is code
            assert (
                error.details() == f"fake failure of {dict(error.trailing_metadata())['x-npufleet-engine']}"
            )
        assert f.served() == [5, 5]
        assert f.router.picker.models() == {MODEL: 2}


@pytest.mark.parametrize(("code", "verb"), [(Code.UNAVAILABLE, "was lost"), (Code.INTERNAL, "failed")])
async def test_nothing_is_retried_after_the_first_message(code: grpc.StatusCode, verb: str):
    bad, good = FakeEngine(name="a", fail_at=2, fail_code=code), FakeEngine(name="b")
    async with fleet(bad, good) as f:
        got, error = [], None
        call = f.stub.Generate(generate_request(5))
        try:
            async for answer in call:
                got += answer.chunk.token_ids
        except grpc.aio.AioRpcError as caught:
            error = caught
        assert got == [6, 7]
        assert error is not None and error.code() is code
        assert f"'a' {verb} after 2 messages: fake failure of a" in error.details()
        assert f.served() == [1, 0]


async def test_a_request_that_breaks_engines_meets_two_at_most():
    engines = [FakeEngine(name=n, fail_at=0, fail_code=Code.INTERNAL) for n in "abcd"]
    async with fleet(*engines) as f:
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.INTERNAL
        assert sum(f.served()) == 2


async def test_the_retry_budget_bounds_a_storm():
    engines = [FakeEngine(name=n, fail_at=0, fail_code=Code.INTERNAL) for n in "abc"]
    async with fleet(*engines, settings=RouterSettings(retry_budget=5, breaker_failures=1000)) as f:
        for _ in range(20):
            await error_of(f.stub.Generate(generate_request()))
        assert sum(f.served()) == 25
        assert f.metric("npufleet_router_retries_refused_total") == 15


async def test_embed_is_relayed_and_retried():
    bad, good = FakeEngine(name="a", fail_at=0), FakeEngine(name="b")
    async with fleet(bad, good) as f:
        request = pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]))
        for _ in range(3):
            assert list((await f.stub.Embed(request)).embedding) == [3.0]


async def test_an_unknown_model_lists_the_models():
    one, two = FakeEngine(name="a"), FakeEngine(name="b")
    await one.start()
    await two.start()
    source = ListSource(endpoint(one, model="llama"), endpoint(two, model="qwen"))
    async with fleet(one, two, source=source) as f:
        error = await error_of(f.stub.Generate(generate_request(), metadata=(("x-npufleet-model", "gpt"),)))
        assert error.code() is Code.NOT_FOUND
        assert "'gpt'" in error.details() and "'llama', 'qwen'" in error.details()
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.INVALID_ARGUMENT and "'llama', 'qwen'" in error.details()
        await tokens_of(f.stub.Generate(generate_request(), metadata=(("x-npufleet-model", "qwen"),)))
        assert f.served() == [0, 1]
        assert f.metric(
            "npufleet_router_requests_total",
            model="unknown", method="Generate", outcome="client_error", code="NOT_FOUND",
        ) == 1  # fmt: skip
    await one.stop()
    await two.stop()


async def test_no_ready_engine_says_so_and_when_to_retry():
    engine = FakeEngine(name="a", healthy=False)
    async with fleet(engine, wait=False) as f:
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.UNAVAILABLE
        assert "1 connecting" in error.details() and "try again in 1 s" in error.details()
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        engine.healthy = True
        await until(lambda: f.router.picker.models() == {MODEL: 1})
        assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]


async def test_an_empty_fleet_is_unavailable_not_unknown():
    async with fleet(wait=False) as f:
        error = await error_of(f.stub.Generate(generate_request()))
        assert error.code() is Code.UNAVAILABLE and "no engine is known" in error.details()


async def test_a_request_that_is_not_a_message_is_refused_and_disturbs_nobody():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine) as f:
        running = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(30))))
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x12"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw_answers(f.channel, garbage)
            assert caught.value.code() is Code.INVALID_ARGUMENT
            assert "GenerateRequest" in caught.value.details()
        assert len(await running) == 30
        assert len(engine.seen) == 1


async def test_a_message_above_the_limit_is_refused_and_the_connection_lives():
    engine = FakeEngine(name="a", options=(("grpc.max_receive_message_length", -1),))
    async with fleet(engine, settings=RouterSettings(max_request_bytes=100_000)) as f:
        error = await error_of(f.stub.Generate(generate_request(prompt=tuple(range(100_000)))))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "larger" in error.details()
        assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]
        assert not [request for request in engine.seen if len(request.tokenized.input_ids) > 3]


async def test_metadata_above_the_limit_is_refused_and_the_connection_lives():
    limits = ("grpc.max_metadata_size", "grpc.absolute_max_metadata_size")
    engine = FakeEngine(name="a", options=tuple((name, 16 * 1024) for name in limits))
    async with fleet(engine) as f:
        for size in (20_000, 200_000):
            error = await error_of(
                f.stub.Generate(generate_request(), metadata=(("x-big-bin", b"x" * size),))
            )
            assert error.code() is Code.RESOURCE_EXHAUSTED and "metadata" in error.details()
        call = f.stub.Generate(generate_request(1), metadata=(("x-npufleet-ext-bin", b"x" * 10_000),))
        assert await tokens_of(call) == [6]


async def test_a_megabyte_prompt_passes():
    engine = FakeEngine(name="a")
    async with fleet(engine) as f:
        request = generate_request(1)
        request.text = "x" * 1_000_000
        assert len(await tokens_of(f.stub.Generate(request))) == 1


async def test_garbage_frames_disturb_nobody():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine) as f:
        running = asyncio.create_task(tokens_of(f.stub.Generate(generate_request(40))))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        frames = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 64,
            b"\x16\x03\x01" + b"\xff" * 200,
            preface + b"\xff" * 9,
            preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x05\x00\x00\x00\x00\x00\x01junk!",
            preface + b"\x00\x00\x08\x01\x05\x00\x00\x00\x01" + b"\xff" * 8,
        ]
        for frame in frames:
            reader, writer = await asyncio.open_connection("127.0.0.1", f.router.port)
            writer.write(frame)
            await writer.drain()
            writer.write_eof()
            with suppress(ConnectionError):  # it may hang up on us
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert len(await running) == 40
        assert await tokens_of(f.stub.Generate(generate_request(1))) == [6]


async def test_same_request_ids_of_several_clients_do_not_clash():
    engine = FakeEngine(name="a", delay=0.01)
    async with fleet(engine) as f, grpc.aio.insecure_channel(f.router.address) as other:
        calls = [f.stub.Generate(generate_request(20)) for _ in range(3)]
        calls += [f.stub.Generate(generate_request(20, request_id="")) for _ in range(2)]
        streams = await asyncio.gather(*(tokens_of(call) for call in calls), raw_answers_of(other))
        assert [len(stream) for stream in streams] == [20] * 5 + [21]
        ids = [request.request_id for request in engine.seen]
        assert len(set(ids)) == 6 and all(ids)
        assert sum(request_id.startswith("r-") for request_id in ids) == 3
        assert len(f.router._front.live) == 0


async def raw_answers_of(channel: grpc.aio.Channel) -> list[bytes]:
    return await raw_answers(channel, generate_request(20).SerializeToString())


async def test_abort_ends_the_callers_request_only():
    engines = [FakeEngine(name=n, delay=0.01) for n in "ab"]
    async with (
        fleet(*engines) as f,
        grpc.aio.insecure_channel(f.router.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        mine = f.stub.Generate(generate_request(100_000))
        await mine.read()
        theirs = other.unary_stream(GENERATE)(generate_request(100_000).SerializeToString())
        await theirs.read()
        await f.stub.Abort(pb.AbortRequest(request_ids=["r", "never heard of"]))
        last = None
        while (answer := await mine.read()) is not grpc.aio.EOF:
            last = answer
        assert last is not None
        assert last.complete.finish_reason == "abort"
        aborted = engines[0].aborted + engines[1].aborted
        assert len(aborted) == 1
        assert await theirs.read() is not grpc.aio.EOF
        theirs.cancel()


async def test_abort_of_an_id_that_two_others_run_is_refused():
    engine = FakeEngine(name="a", delay=0.01)
    local = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        fleet(engine, settings=QUICK) as f,
        grpc.aio.insecure_channel(f.router.address, options=local) as one,
        grpc.aio.insecure_channel(f.router.address, options=local) as two,
    ):
        calls = [c.unary_stream(GENERATE)(generate_request(100_000).SerializeToString()) for c in (one, two)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await f.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        assert caught.value.code() is Code.FAILED_PRECONDITION
        assert engine.aborted == []
        for call in calls:
            call.cancel()
