"""The gRPC front under mutated requests: the client's fault stays the client's, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.router.envoy.server import serve_endpoint_picker
from npufleet.cluster.router.hedge import HedgeSettings
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import METHODS, path

from .router_fakes import MODEL, QUICK, FakeEngine, fleet, generate_request, tokens_of

Code = grpc.StatusCode
REFUSED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION}
FINE = {Code.OK, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNIMPLEMENTED, *REFUSED}


def seeds() -> dict[str, list[bytes]]:
    """Whole requests to mutate, by method."""
    generate = pb.GenerateRequest(
        request_id="fuzz",
        tokenized=pb.TokenizedInput(original_text="text", input_ids=[1, 2, 3, 2**32 - 1]),
        sampling_params=pb.SamplingParams(
            max_tokens=3, temperature=0.5, stop=["a"], logit_bias={1: 0.5}, json_schema="{}"
        ),
        stream=True,
        kv_transfer_params_json="{}",
    )
    made: dict[str, list[Message]] = {name: [] for name in METHODS}
    made["Generate"] = [generate, generate_request(2), pb.GenerateRequest(text="plain text")]
    made["Embed"] = [pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[1, 2]))]
    made["Abort"] = [pb.AbortRequest(request_ids=["fuzz", "other", ""])]
    made["GetLoads"] = [pb.GetLoadsRequest(include=["core", "nonsense"], dp_rank=3)]
    made["FlushCache"] = [common_pb2.FlushCacheRequest()]
    return {name: [b"", *(m.SerializeToString() for m in messages)] for name, messages in made.items()}


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """``raw`` with a few of the faults that a broken or hostile encoder makes."""
    data = bytearray(raw)
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(data))
        match rng.randint(0, 7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randint(0, 7)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                data += data[at:]
            case 4:
                data[at:at] = b"\xff" * 9 + b"\x01"  # the longest varint
            case 5:
                number, kind = rng.randint(1, 2000), rng.choice([0, 1, 2, 3, 4, 5, 6, 7])
                key = number << 3 | kind
                data[at:at] = bytes([key & 0x7F | 0x80, key >> 7 & 0x7F])
            case 6:
                data[at:at] = b"\x12\xff\xff\xff\x7f"  # a field longer than the message
            case 7:
                data[at:at] = "\ud7ff\u0000é".encode() + b"\xc3\x28"  # text that is not UTF-8
    return bytes(data)


def metadata(rng: random.Random) -> list[tuple[str, str | bytes]]:
    """Request metadata as a client might send it."""
    choices: list[tuple[str, str | bytes]] = [
        ("x-npufleet-model", rng.choice([MODEL, "none", " ", "x" * 300])),
        ("x-npufleet-engine", rng.choice(["a", "none"])),
        ("x-npufleet-session", "s" * rng.randint(1, 500)),
        ("x-npufleet-ext-bin", rng.randbytes(rng.randint(0, 60))),
        ("traceparent", rng.choice(["", "00-zz", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"])),
        (f"x-{rng.randint(0, 9)}-bin", rng.randbytes(30)),
        ("grpc-previous-rpc-attempts", "7"),
        ("te", "nothing"),
    ]
    return rng.sample(choices, rng.randint(0, 3))


def plain() -> tuple[list[FakeEngine], RouterSettings]:
    return [FakeEngine(name=name) for name in "ab"], QUICK


def pairs() -> tuple[list[FakeEngine], RouterSettings]:
    """Prompts of two tokens and more are computed apart."""
    roles = {"a": "prefill", "b": "decode"}
    made = [FakeEngine(name=name, role=role, connector="NixlConnector") for name, role in roles.items()]
    return made, replace(QUICK, split_tokens=2)


def hedged() -> tuple[list[FakeEngine], RouterSettings]:
    return plain()[0], replace(QUICK, hedging=HedgeSettings(max_tokens=8, percentile=0.5, budget=1.0))


@pytest.mark.parametrize("kind", [plain, pairs, hedged])
@pytest.mark.parametrize("seed", range(3))
async def test_mutated_requests_are_refused_and_disturb_nobody(
    seed: int, kind: Callable[[], tuple[list[FakeEngine], RouterSettings]]
):
    rng = random.Random(seed)
    engines, settings = kind()
    samples = seeds()
    codes: Counter[grpc.StatusCode] = Counter()
    wrong: list[str] = []
    async with fleet(*engines, settings=settings) as f:
        stop = asyncio.Event()

        async def victim(number: int) -> int:
            """Somebody else, whose answers must stay right."""
            answers = 0
            while not stop.is_set():
                tokens = await tokens_of(f.stub.Generate(generate_request(5, (number,), f"v{number}")))
                assert tokens == [number + i for i in range(5)]
                answers += 1
                await asyncio.sleep(0)
            return answers

        victims = [asyncio.create_task(victim(i)) for i in range(1, 4)]

        async def attack() -> None:
            for _ in range(40):
                name = rng.choice([*METHODS, "Generate", "Generate", "Generate"])
                raw = mutated(rng.choice(samples[name]), rng)
                streams = METHODS[name].server_streaming
                call = (f.channel.unary_stream if streams else f.channel.unary_unary)(path(name))(
                    raw, metadata=metadata(rng), timeout=0.3 if name == "SubscribeKvEvents" else 20.0
                )
                try:
                    async with asyncio.timeout(30):
                        if streams:
                            while await call.read() is not grpc.aio.EOF:
                                pass
                        else:
                            await call
                    code = Code.OK
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                    if code not in FINE:
                        wrong.append(f"{name} {raw!r}: {code} {error.details()}")
                codes[code] += 1

        await asyncio.gather(*(attack() for _ in range(8)))
        stop.set()
        assert all(await asyncio.gather(*victims))
        assert f.router.picker.models() == {MODEL: 2}, "no engine may be blamed for a client's request"
    assert not wrong, wrong[:5]
    assert codes[Code.INVALID_ARGUMENT] > 10 and codes[Code.OK] > 10, codes


async def test_what_is_no_message_is_the_clients_fault_in_our_own_services_too(
    caplog: pytest.LogCaptureFixture,
):
    async with fleet(FakeEngine(name="a")) as f:
        picker = await serve_endpoint_picker(f.router, QUICK, "127.0.0.1:0")
        async with grpc.aio.insecure_channel(picker.address) as gateway:
            process = gateway.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
            calls = [
                f.channel.unary_unary("/npufleet.Lookaside/Route")(b"\xff", timeout=20),
                f.channel.unary_unary("/npufleet.Lookaside/Report")(b"\x0a\xff", timeout=20),
                process(iter([b"\xff"]), timeout=20),
            ]
            assert [await call.code() for call in calls] == [Code.INVALID_ARGUMENT] * 3
        await picker.close()
    assert not [record for record in caplog.records if record.exc_info]
