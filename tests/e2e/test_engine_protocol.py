"""What a stock VllmEngine client gets from the fleet's gRPC router."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from .fleet import MODEL, Fleet

# "What is the capital of France?" in the model's chat template
PROMPT = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
]
PROMPT += [198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris." and the end


@pytest.fixture
def channel(fleet: Fleet) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(fleet.router) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.Channel) -> pb_grpc.VllmEngineStub:
    return pb_grpc.VllmEngineStub(channel)


def request(request_id: str, *, max_tokens: int = 16, ignore_eos: bool = False) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id=request_id, stream=True)
    made.tokenized.input_ids.extend(PROMPT)
    made.sampling_params.temperature = 0.0
    made.sampling_params.max_tokens = max_tokens
    made.sampling_params.ignore_eos = ignore_eos
    return made


def test_generate_streams_the_answer(stub: pb_grpc.VllmEngineStub) -> None:
    answers = list(stub.Generate(request("greedy"), timeout=120))
    chunks = [answer.chunk for answer in answers if answer.WhichOneof("response") == "chunk"]
    assert [token for chunk in chunks for token in chunk.token_ids] == PARIS
    complete = answers[-1].complete
    assert complete.finish_reason == "stop"
    assert complete.prompt_tokens == len(PROMPT)


def test_abort_ends_a_stream(stub: pb_grpc.VllmEngineStub) -> None:
    stream = stub.Generate(request("long", max_tokens=1500, ignore_eos=True), timeout=180)
    next(stream)
    aborter = threading.Thread(target=lambda: stub.Abort(pb.AbortRequest(request_ids=["long"]), timeout=60))
    aborter.start()
    rest = list(stream)
    aborter.join()
    assert len(rest) < 1400
    assert rest[-1].complete.finish_reason == "abort"


def test_model_and_server_info(stub: pb_grpc.VllmEngineStub) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert info.served_model_name == MODEL
    assert info.max_context_length == 2048
    assert info.vocab_size == 49152
    assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).ListFields()


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "vllm.grpc.engine.VllmEngine"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    listed = next(reflect.ServerReflectionInfo(asked, timeout=60)).list_services_response.service
    assert "vllm.grpc.engine.VllmEngine" in {service.name for service in listed}


def test_garbage_hurts_nobody(fleet: Fleet, stub: pb_grpc.VllmEngineStub, channel: grpc.Channel) -> None:
    raw = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
    with pytest.raises(grpc.RpcError) as error:
        list(raw(b"\xff" * 64, timeout=60))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for noise in (
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    ):
        with socket.create_connection(("127.0.0.1", fleet.grpc), timeout=30) as connection:
            connection.sendall(noise)
    test_generate_streams_the_answer(stub)
