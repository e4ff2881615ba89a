"""The Endpoint Picker Protocol: its wire contract, and Envoy's ext_proc filter as a client of it."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npufleet.cluster.proto import envoy_pb2 as pb
from npufleet.cluster.router.envoy.ended import PASSED_OVER
from npufleet.cluster.router.envoy.settings import Filter

from .envoy_fakes import envoy_fleet
from .router_fakes import MODEL, FakeEngine, generate_request, tokens_of, until

Code = grpc.StatusCode
KEY = "x-gateway-destination-endpoint"
PATH = "/vllm.grpc.engine.VllmEngine/Generate"
Mode = pb.ProtocolConfiguration


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def headers_message(mode: int, subset: list[str] | None = None, **extra: str) -> pb.ProcessingRequest:
    values = {":path": PATH, ":method": "POST", "content-type": "application/grpc", **extra}
    message = pb.ProcessingRequest(protocol_config=Mode(request_body_mode=mode))
    for key, value in values.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": subset}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def body_message(body: bytes, last: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=last))


def destination(answer: pb.ProcessingResponse) -> str:
    """The engine in ``answer``, the same in the header and in the metadata."""
    part = getattr(answer, answer.WhichOneof("response")).response
    found = {o.header.key: o.header.raw_value.decode() for o in part.header_mutation.set_headers}
    told = json_format.MessageToDict(answer.dynamic_metadata)
    assert told == {"envoy.lb": {KEY: found[KEY]}}
    return found[KEY]


class Gateway:
    """A gateway's side of one exchange, by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    async def ask(self, *messages: pb.ProcessingRequest) -> pb.ProcessingResponse:
        for message in messages:
            await self.call.write(message)
        return await self.call.read()


def picker_channel(f) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{f.folder}/picker.grpc")


REQUEST = framed(generate_request(2, (1, 2, 3)).SerializeToString())


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_streamed_body_is_seen_whole_and_given_back_as_it_came(pieces: int):
    a, b = FakeEngine(name="a"), FakeEngine(name="b")
    async with envoy_fleet(a, b) as f, picker_channel(f) as channel:
        size = -(-len(REQUEST) // pieces)
        parts = [REQUEST[i : i + size] for i in range(0, len(REQUEST), size)]
        gateway = Gateway(channel)
        bodies = [body_message(part, i == len(parts) - 1) for i, part in enumerate(parts)]
        first = await gateway.ask(headers_message(Mode.FULL_DUPLEX_STREAMED), *bodies)
        hosts = destination(first).split(",")
        assert hosts == [a.address, b.address]  # whom it means, and where a retry may go
        back = [
            (await gateway.call.read()).request_body.response.body_mutation.streamed_response for _ in parts
        ]
        assert [piece.body for piece in back] == parts
        assert [piece.end_of_stream for piece in back] == [False] * (len(parts) - 1) + [True]
        assert f.router.picker.pool.member("a").in_flight == 1
        await gateway.call.done_writing()
        await until(lambda: f.router.picker.pool.member("a").in_flight == 0)


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED])
async def test_without_the_body_headers_decide(mode: int):
    a = FakeEngine(name="a")
    async with envoy_fleet(a) as f, picker_channel(f) as channel:
        answer = await Gateway(channel).ask(headers_message(mode))
        assert answer.WhichOneof("response") == "request_headers"
        assert destination(answer) == a.address


async def test_a_buffered_body_is_answered_with_the_engine():
    a = FakeEngine(name="a")
    async with envoy_fleet(a) as f, picker_channel(f) as channel:
        gateway = Gateway(channel)
        first = await gateway.ask(headers_message(Mode.BUFFERED))
        assert first == pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        assert destination(await gateway.ask(body_message(REQUEST))) == a.address


async def test_a_subset_is_kept_to_and_an_empty_one_is_503():
    a, b = FakeEngine(name="a"), FakeEngine(name="b")
    async with envoy_fleet(a, b) as f, picker_channel(f) as channel:
        for _ in range(3):
            answer = await Gateway(channel).ask(headers_message(Mode.NONE, [b.address, "10.0.0.1:1"]))
            assert destination(answer) == b.address
        for subset in ([], ["10.0.0.1:1"]):
            answer = await Gateway(channel).ask(headers_message(Mode.NONE, subset))
            assert answer.immediate_response.status.code == 503


async def test_what_cannot_be_placed_is_answered_at_once():
    async with envoy_fleet(FakeEngine(name="a")) as f, picker_channel(f) as channel:
        cases = [
            (headers_message(Mode.NONE, **{"x-npufleet-model": "nope"}), 404, Code.NOT_FOUND),
            (headers_message(Mode.NONE, **{":path": "/v1/chat/completions"}), 501, Code.UNIMPLEMENTED),
        ]
        f.source.put()
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        cases.append((headers_message(Mode.NONE), 503, Code.UNAVAILABLE))
        for message, status, code in cases:
            answer = (await Gateway(channel).ask(message)).immediate_response
            assert (answer.status.code, answer.grpc_status.status) == (status, code.value[0])
        garbage = await Gateway(channel).ask(
            headers_message(Mode.FULL_DUPLEX_STREAMED), body_message(framed(b"\xff\xff"))
        )
        assert garbage.immediate_response.status.code == 400


async def test_the_response_tells_how_the_engine_did():
    a, b = FakeEngine(name="a"), FakeEngine(name="b")
    async with envoy_fleet(a, b) as f, picker_channel(f) as channel:
        gateway = Gateway(channel)
        await gateway.ask(headers_message(Mode.NONE))
        load = f.router.picker.pool.member("a").ledgers[0].share
        assert (load().in_flight, load().queued) == (1, 1)
        served = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
        served.metadata_context.filter_metadata["envoy.lb"].update(
            {"x-gateway-destination-endpoint-served": b.address}
        )
        assert (await gateway.ask(served)).WhichOneof("response") == "response_headers"
        assert (load().in_flight, load().queued) == (1, 0)
        trailers = pb.HttpTrailers()
        trailers.trailers.headers.add(key="grpc-status", raw_value=b"0")
        answer = await gateway.ask(pb.ProcessingRequest(response_trailers=trailers))
        assert answer.WhichOneof("response") == "response_trailers"
        await gateway.call.done_writing()
        await until(lambda: load().in_flight == 0)
        # another engine than the one meant has served: the one meant is looked at, and is well
        labels = {"model": MODEL, "method": "Generate", "outcome": "ok", "code": "OK"}
        assert f.metric("npufleet_router_requests_total", **labels) == 1
        assert f.router.picker.models() == {MODEL: 2}


async def test_an_engine_that_is_passed_over_again_and_again_rests():
    a, b = FakeEngine(name="a"), FakeEngine(name="b")
    async with envoy_fleet(a, b) as f:
        away, engines = f.router.away, f.router.asked.engines
        member = f.router.picker.pool.member("a")
        for _ in range(20):
            if not member.pickable:
                break
            placed = await f.router.asked.place(PATH, {}, None, excluded=frozenset("b"))
            away.ended(placed.away.id, Code.OK, engine=PASSED_OVER)
        assert not member.pickable
        assert engines.get("a") is not None  # Envoy still knows it, for the streams that run there
        await until(lambda: member.pickable)


async def test_its_health_services():
    async with envoy_fleet(FakeEngine(name="a")) as f, picker_channel(f) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        name = "envoy.service.ext_proc.v3.ExternalProcessor"

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await status(s) for s in ("liveness", "readiness", name)] == [1, 1, 1]
        f.source.put()
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        assert [await status(s) for s in ("liveness", "readiness", name)] == [1, 2, 2]


async def test_envoys_own_filter_as_its_client():
    engines = [FakeEngine(name="a"), FakeEngine(name="b")]
    async with envoy_fleet(*engines, filter=Filter.EXT_PROC) as f:
        for _ in range(4):
            call = f.stub.Generate(generate_request(5, (7,)), metadata=((KEY, "127.0.0.1:1"),))
            assert await tokens_of(call) == [7, 8, 9, 10, 11]
        assert f.served() == [2, 2]
        prompt = tuple(range(300_000))
        assert len(await tokens_of(f.stub.Generate(generate_request(1, prompt)))) == 1
        await until(lambda: not len(f.router.away))
        labels = {"model": MODEL, "method": "Generate", "outcome": "ok", "code": "OK"}
        assert f.metric("npufleet_router_requests_total", **labels) == 5
        assert f.metric("npufleet_router_first_message_seconds_count", model=MODEL) == 5
        engines[0].delay = engines[1].delay = 60
        call = f.stub.Generate(generate_request(5))
        await until(lambda: sum(f.served()) == 6)
        call.cancel()
        await until(lambda: any(engine.cancelled for engine in engines))
        await until(lambda: not len(f.router.away))


async def test_envoys_own_filter_refuses_and_retries_as_the_picker_says():
    bad = FakeEngine(name="a", fail_at=0, fail_code=Code.UNAVAILABLE, greets=False)
    good = FakeEngine(name="b")
    async with envoy_fleet(bad, good, filter=Filter.EXT_PROC) as f:
        for _ in range(3):
            assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]
        assert bad.seen and len(good.seen) == 3
        for model, code in (("nope", Code.NOT_FOUND),):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(f.stub.Generate(generate_request(), metadata=(("x-npufleet-model", model),)))
            assert caught.value.code() is code and "there is: 'tiny'" in caught.value.details()
        f.source.put()
        await until(lambda: f.router.picker.models() == {MODEL: 0})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(f.stub.Generate(generate_request()))
        assert caught.value.code() is Code.UNAVAILABLE
