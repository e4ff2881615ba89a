"""The engine's gRPC service over an AsyncLLM without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from npufleet.cluster.engine.service import EngineServer, serve_engine
from npufleet.cluster.engine.service_rpc import SERVICE_NAME
from npufleet.cluster.proto.extension import EXTENSION_KEY, FIELDS, MAX_ENCODED_BYTES, encode
from npufleet.cluster.proto.features import read
from tests.fakes.async_llm import FakeAsyncLLM

CODE = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def llm() -> FakeAsyncLLM:
    return FakeAsyncLLM()


@pytest_asyncio.fixture
async def server(llm: FakeAsyncLLM) -> AsyncIterator[EngineServer]:
    served = await serve_engine(llm)
    yield served
    await served.stop()


@pytest_asyncio.fixture
async def channel(server: EngineServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as opened:
        yield opened


def request(stream: bool = True, ids: tuple[int, ...] = (1, 2), **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**{"max_tokens": 3, **params}),
        stream=stream,
    )


async def generate(channel: grpc.aio.Channel, message: Any, **fields: Any) -> list[pb.GenerateResponse]:
    metadata = ((EXTENSION_KEY, encode(fields)),) if fields else None
    call = pb_grpc.VllmEngineStub(channel).Generate(message, metadata=metadata, timeout=30)
    return [response async for response in call]


async def refusal(channel: grpc.aio.Channel, message: Any, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, message, **fields)
    return caught.value


async def test_a_stock_client_streams(channel: grpc.aio.Channel) -> None:
    responses = await generate(channel, request())
    assert [list(r.chunk.token_ids) for r in responses[:-1]] == [[10], [11], [12]]
    assert responses[-1].complete.finish_reason == "length"


async def test_one_piece(channel: grpc.aio.Channel) -> None:
    (response,) = await generate(channel, request(stream=False))
    assert list(response.complete.output_ids) == [10, 11, 12]


async def test_all_tokens_that_end_an_answer_are_told(llm: FakeAsyncLLM, channel: grpc.aio.Channel) -> None:
    llm.model_config.get_vocab_size = lambda: 10
    llm.model_config.hf_config = SimpleNamespace(eos_token_id=7)
    llm.model_config.try_get_generation_config = lambda: {"eos_token_id": [9, 7]}
    info = await pb_grpc.VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert list(info.eos_token_ids) == [7, 9]


async def test_extension_fields_reach_the_engine(llm: FakeAsyncLLM, channel: grpc.aio.Channel) -> None:
    await generate(
        channel,
        request(seed=3, json_schema="{}"),
        seed=2**40,
        bad_words=["no"],
        allowed_token_ids=[5],
        skip_reading_prefix_cache=True,
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
        structured_outputs={"disable_any_whitespace": True},
        extra_args={"mine": 1},
        cache_salt="tenant",
        priority=-3,
        session_id="s",
        lora={"name": "a", "id": 2, "path": "/adapters/a"},
    )
    (call,) = llm.calls
    params = call["params"]
    assert (params.seed, params.bad_words, params.allowed_token_ids) == (2**40, ["no"], [5])
    assert params.skip_reading_prefix_cache is True
    assert params.repetition_detection.max_pattern_size == 4
    assert params.structured_outputs.disable_any_whitespace is True
    assert params.extra_args == {"mine": 1}
    assert call["prompt"]["cache_salt"] == "tenant"
    assert (call["priority"], call["session_id"]) == (-3, "s")
    assert (call["lora_request"].lora_name, call["lora_request"].lora_int_id) == ("a", 2)


async def test_a_call_without_extension_is_not_touched_by_the_one_before(
    llm: FakeAsyncLLM, channel: grpc.aio.Channel
) -> None:
    await generate(channel, request(), cache_salt="tenant", bad_words=["no"])
    await generate(channel, request())
    assert "cache_salt" not in llm.calls[1]["prompt"]
    assert llm.calls[1]["params"].bad_words == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xc1", "msgpack"),
        (b"\x82\xa1v\x01\xa6future\x01", "future"),
        (b"\x82\xa1v\x01\xa4seed\xa1x", "seed must be"),
        (b"\x81\xa1v\x07", "version 7"),
    ],
)
async def test_an_extension_that_is_wrong_is_an_invalid_argument(
    llm: FakeAsyncLLM, channel: grpc.aio.Channel, data: bytes, words: str
) -> None:
    call = pb_grpc.VllmEngineStub(channel).Generate(request(), metadata=((EXTENSION_KEY, data),), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert words in caught.value.details()
    assert not llm.calls


@pytest.mark.parametrize(
    ("message", "fields", "words"),
    [
        (request(ids=()), {}, "prompt is empty"),
        (pb.GenerateRequest(text="", sampling_params=pb.SamplingParams()), {}, "prompt is empty"),
        (pb.GenerateRequest(), {}, "prompt is empty"),
        (request(temperature=float("nan")), {}, "temperature"),
        (request(temperature=-1.0), {}, "temperature"),
        (request(top_p=7.0), {}, "top_p"),
        (request(min_tokens=9), {}, "min_tokens"),
        (request(), {"bad_words": [""]}, "bad_words"),
        (request(), {"stream_interval": 0}, "stream_interval"),
        (request(), {"lora": {"name": "a"}}, "lora needs"),
        (request(), {"structured_outputs": {"disable_any_whitespace": True}}, "no constraint"),
    ],
)
async def test_bad_requests_are_invalid_arguments(
    llm: FakeAsyncLLM, channel: grpc.aio.Channel, message: Any, fields: dict[str, Any], words: str
) -> None:
    error = await refusal(channel, message, **fields)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert words in error.details()
    assert await generate(channel, request())


async def test_what_the_engine_refuses_keeps_its_text(llm: FakeAsyncLLM, channel: grpc.aio.Channel) -> None:
    llm.error = VLLMValidationError("the prompt has 900 tokens, the limit is 64")
    error = await refusal(channel, request())
    assert (error.code(), error.details()) == (CODE.INVALID_ARGUMENT, str(llm.error))


async def test_a_dying_engine_is_internal_and_a_dead_one_unavailable(
    llm: FakeAsyncLLM, channel: grpc.aio.Channel
) -> None:
    llm.error, llm.error_at = EngineDeadError(), 1
    assert (await refusal(channel, request())).code() is CODE.INTERNAL
    llm.errored = True
    assert (await refusal(channel, request())).code() is CODE.UNAVAILABLE
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    assert not (await pb_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest())).healthy


async def test_a_garbage_frame_harms_nobody(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(f"/{SERVICE_NAME}/Generate")(b"\xff\xff\xff\xff garbage", timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    assert caught.value.code() in (CODE.INTERNAL, CODE.INVALID_ARGUMENT, CODE.UNKNOWN)
    assert len(await generate(channel, request())) == 4


async def test_metadata_above_the_limit_is_refused_and_the_largest_extension_accepted(
    llm: FakeAsyncLLM, channel: grpc.aio.Channel
) -> None:
    salt = "s" * (MAX_ENCODED_BYTES - 32)
    await generate(channel, request(), cache_salt=salt)
    assert llm.calls[0]["prompt"]["cache_salt"] == salt
    stub = pb_grpc.VllmEngineStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request(), metadata=((EXTENSION_KEY, b"x" * 40_000),), timeout=30):
            pass
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED


async def test_features_and_limits_are_told(channel: grpc.aio.Channel) -> None:
    stub = pb_grpc.VllmEngineStub(channel)
    call = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
    info = await call
    assert info.server_type == "vllm-grpc"
    assert info.uptime_seconds > 0
    features = read(await call.initial_metadata())
    assert features.fields == frozenset(FIELDS)
    assert features.limits == {"max_logprobs": 20}


async def test_ranks_are_spelled_out_only_when_asked_for(channel: grpc.aio.Channel) -> None:
    plain = (await generate(channel, request(logprobs=1)))[0].chunk.output_logprobs
    assert list(plain.top_logprobs[0].token_ids) == [10]
    message = request(logprobs=1, prompt_logprobs=1)
    chunk = (await generate(channel, message, logprob_ranks=True))[0].chunk
    top = chunk.output_logprobs.top_logprobs[0]
    assert (list(top.token_ids), list(top.values)) == ([10, 1, 2, 7], [-2.0, -0.5, -1.0])
    first, second = chunk.input_logprobs.top_logprobs
    assert not first.token_ids
    assert (list(second.token_ids), list(second.values)) == ([2, 5, 9], [-3.0, -0.5])


async def test_a_client_that_leaves_cancels(llm: FakeAsyncLLM, channel: grpc.aio.Channel) -> None:
    llm.gate = asyncio.Event()
    call = pb_grpc.VllmEngineStub(channel).Generate(request(), timeout=30)
    await call.read()
    call.cancel()
    await asyncio.wait_for(llm.cancelled.wait(), 30)


async def test_abort_passes_the_ids_on(llm: FakeAsyncLLM, channel: grpc.aio.Channel) -> None:
    await pb_grpc.VllmEngineStub(channel).Abort(pb.AbortRequest(request_ids=["a", "b"]), timeout=30)
    assert llm.aborted == ["a", "b"]


async def test_health_knows_the_server_and_the_service(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE_NAME):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is CODE.NOT_FOUND


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_drain_tells_first_then_waits_for_running_streams(
    llm: FakeAsyncLLM, server: EngineServer, channel: grpc.aio.Channel
) -> None:
    llm.gate = asyncio.Event()
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    running = pb_grpc.VllmEngineStub(channel).Generate(request(), timeout=30)
    await running.read()
    draining = asyncio.create_task(server.drain(30))
    assert (await watch.read()).status == NOT_SERVING
    assert (await refusal(channel, request())).code() is CODE.UNAVAILABLE
    assert server.active == 1
    llm.gate.set()
    rest = [await running.read() for _ in range(3)]
    assert rest[-1].complete.finish_reason == "length"
    assert await draining == 0


async def test_drain_cuts_what_outlives_the_deadline(
    llm: FakeAsyncLLM, server: EngineServer, channel: grpc.aio.Channel
) -> None:
    llm.gate = asyncio.Event()
    running = pb_grpc.VllmEngineStub(channel).Generate(request(), timeout=30)
    await running.read()
    assert await server.drain(0.1) == 1
    with pytest.raises(grpc.aio.AioRpcError):
        await running.read()
        await running.read()


async def test_a_port_in_use_is_an_error_that_names_it(llm: FakeAsyncLLM, server: EngineServer) -> None:
    with pytest.raises(OSError, match=str(server.port)):
        await serve_engine(llm, port=server.port)
