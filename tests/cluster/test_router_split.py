"""Prompts that one engine computes and another one goes on with, over fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from npufleet.cluster.endpoints import EngineEndpoint, Role
from npufleet.cluster.proto.extension import EXTENSION_KEY, decode, encode
from npufleet.cluster.router.pool import StaticSource
from npufleet.cluster.router.sources import ToldBySelf
from npufleet.cluster.router.split.base import Stage
from npufleet.cluster.router.split.registry import handoff_of, known_connectors
from npufleet.cluster.router.split.requests import (
    may_split,
    prefill_metadata,
    prefill_request,
    with_params,
    worth_splitting,
)
from npufleet.cluster.router.split.roles import fit_for

from .router_fakes import QUICK, FakeEngine, endpoint, fleet, generate_request, tokens_of, until

SETTINGS = replace(QUICK, split_tokens=100)
LONG = tuple(range(200))
SOURCE = EngineEndpoint(
    engine_id="p", model="m", address="10.0.0.1:9", metrics_url="", kv_connector="x", kv_engine_id="kv-p"
)


def engine(name: str, role: str, connector: str = "NixlConnector", **more) -> FakeEngine:
    return FakeEngine(name=name, role=role, connector=connector, **more)


def asked(tokens: int = 4, prompt: tuple[int, ...] = LONG) -> pb.GenerateRequest:
    return generate_request(tokens, prompt)


def expected(tokens: int = 4) -> list[int]:
    return [(sum(LONG) + i) % 50000 for i in range(tokens)]


def split_counts(f) -> dict[str, float]:
    kinds = ("split", "short", "failed", "no_prefill_engine")
    told = {kind: f.metric("npufleet_router_splits_total", model="tiny", outcome=kind) for kind in kinds}
    return {kind: count for kind, count in told.items() if count}


async def test_a_long_prompt_is_computed_by_one_engine_and_answered_by_another() -> None:
    first, second = engine("p", "prefill"), engine("d", "decode")
    async with fleet(first, second, policy="predicted-ttft", settings=SETTINGS) as f:
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        (prefill,), (decoded,) = first.seen, second.seen
        assert prefill.tokenized == decoded.tokenized == asked().tokenized
        assert (prefill.sampling_params.max_tokens, prefill.stream) == (1, False)
        assert json.loads(prefill.kv_transfer_params_json)["do_remote_decode"] is True
        assert json.loads(decoded.kv_transfer_params_json) == {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
        }
        assert decoded.sampling_params == asked().sampling_params
        assert split_counts(f) == {"split": 1}
        members = f.router.picker.pool.members()
        await until(lambda: all(m.in_flight == 0 for m in members))


async def test_a_short_prompt_stays_whole_and_prefill_engines_answer_nobody() -> None:
    first, second = engine("p", "prefill"), engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        for _ in range(3):
            await tokens_of(f.stub.Generate(asked(prompt=(1, 2, 3))))
        assert (len(first.seen), len(second.seen)) == (0, 3)
        assert not second.seen[0].HasField("kv_transfer_params_json")
        assert split_counts(f) == {"short": 3}


async def test_what_is_cached_where_it_would_be_decoded_counts_as_short() -> None:
    first, second = engine("p", "prefill"), engine("d", "decode", events=asyncio.Queue())
    from .test_router_ranks import stored

    async with fleet(first, second, policy="predicted-ttft", settings=SETTINGS) as f:
        second.events.put_nowait(stored(0, 0, list(LONG[:192])))
        index = f.router.picker.decider.index("tiny")
        await until(lambda: index.engine_blocks("d") == 12)
        await tokens_of(f.stub.Generate(asked()))
        assert (len(first.seen), len(second.seen)) == (0, 1)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_prefill_engine_that_fails_costs_no_answer(code: grpc.StatusCode) -> None:
    first, second = engine("p", "prefill", fail_at=0, fail_code=code), engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert not second.seen[0].HasField("kv_transfer_params_json")
        assert split_counts(f) == {"failed": 1}


def _with_params(text: str) -> bytes:
    return pb.GenerateResponse(complete=pb.GenerateComplete(kv_transfer_params_json=text)).SerializeToString()


class Says(grpc.aio.ServerInterceptor):
    """Answers Generate with these bytes, whatever they are."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def intercept_service(self, continuation, handler_call_details):
        async def say(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            yield self._said

        if not handler_call_details.method.endswith("/Generate"):
            return await continuation(handler_call_details)
        return grpc.unary_stream_rpc_method_handler(say)


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff", *map(_with_params, ("{no", '["x"]', "[" * 9999, ""))],
    ids=["no message", "no JSON", "no object", "too deep", "nothing"],
)
async def test_a_prefill_engine_that_talks_nonsense_costs_no_answer(said: bytes) -> None:
    first = engine("p", "prefill", interceptors=(Says(said),))
    second = engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert not second.seen[0].HasField("kv_transfer_params_json")
        assert split_counts(f) == {"failed": 1}
        await until(lambda: all(m.in_flight == 0 for m in f.router.picker.pool.members()))


async def test_what_a_client_gets_wrong_it_is_told() -> None:
    first = engine("p", "prefill", fail_at=0, fail_code=grpc.StatusCode.INVALID_ARGUMENT)
    second = engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(f.stub.Generate(asked()))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not second.seen


async def test_a_decoding_engine_that_fails_is_replaced_by_one_that_does_all() -> None:
    first, bad = engine("p", "prefill"), engine("bad", "decode", fail_at=0)
    good = engine("good", "both")
    async with fleet(first, bad, settings=SETTINGS) as f:
        f.source.put(endpoint(first), endpoint(bad), endpoint(await good.start()))
        await until(lambda: len(f.router.picker.pool.pickable("tiny")) == 3)
        for _ in range(2):
            assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert len(bad.seen) == 1
        whole = [seen for seen in good.seen if not seen.HasField("kv_transfer_params_json")]
        assert len(whole) == 1, "the retry needs nobody's blocks"
    await good.stop()


async def test_without_prefill_engines_the_others_do_all_and_the_other_way_round() -> None:
    first, second = engine("p", "prefill"), engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        f.source.put(endpoint(second))
        await until(lambda: len(f.router.picker.pool.members()) == 1)
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert split_counts(f) == {"no_prefill_engine": 1}
        f.source.put(endpoint(first))
        await until(lambda: [m.engine_id for m in f.router.picker.pool.pickable("tiny")] == ["p"])
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert first.seen[-1].sampling_params.max_tokens == 4


async def test_a_cancel_ends_the_first_request_too() -> None:
    first, second = engine("p", "prefill", delay=30.0), engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        call = f.stub.Generate(asked())
        await until(lambda: first.running)
        call.cancel()
        await until(lambda: not first.running)
        assert not second.seen
        await until(lambda: all(m.in_flight == 0 for m in f.router.picker.pool.members()))


async def test_engines_with_another_name_of_their_own_serve_the_one_that_is_asked_for() -> None:
    first, second = engine("p", "prefill"), engine("d", "decode")
    async with fleet(first, second, settings=SETTINGS) as f:
        f.source.put(replace(endpoint(first), model="tiny-prefill", serves="tiny"), endpoint(second))
        await until(lambda: len(f.router.picker.pool.pickable("tiny")) == 2)
        assert await tokens_of(f.stub.Generate(asked())) == expected()
        assert len(first.seen) == 1


def test_which_requests_may_be_split() -> None:
    assert may_split(asked())
    for change in ({"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 1}):
        request = asked()
        for name, value in change.items():
            setattr(request.sampling_params, name, value)
        assert not may_split(request), change
    own = asked()
    own.kv_transfer_params_json = "{}"
    assert not may_split(own)
    assert worth_splitting(600, 88, 512) and not worth_splitting(600, 89, 512)


def test_nothing_but_its_length_ends_the_first_request() -> None:
    request = asked()
    params = request.sampling_params
    params.min_tokens, params.logprobs, params.json_schema = 3, 5, "{}"
    params.stop.append("x")
    params.stop_token_ids.append(7)
    made = pb.GenerateRequest.FromString(prefill_request(request, None)).sampling_params
    assert (made.max_tokens, made.min_tokens, made.ignore_eos) == (1, 0, True)
    assert not made.stop and not made.stop_token_ids and made.WhichOneof("constraint") is None
    assert request.sampling_params.min_tokens == 3
    fields = {"cache_salt": "s", "structured_outputs": {"disable_any_whitespace": True}}
    kept = dict(prefill_metadata([("a", "b"), (EXTENSION_KEY, encode(fields) or b"")]))
    assert (kept["a"], decode(kept[EXTENSION_KEY])) == ("b", {"cache_salt": "s"})


def test_parameters_are_written_over_what_was_there() -> None:
    raw = asked().SerializeToString()
    assert with_params(raw, None) == raw
    written = pb.GenerateRequest.FromString(with_params(raw, {"a": [1]}))
    assert json.loads(written.kv_transfer_params_json) == {"a": [1]}


def test_each_connector_is_told_what_it_reads() -> None:
    store, nixl, mooncake = (
        handoff_of(n) for n in ("ExampleConnector", "NixlConnector", "MooncakeConnector")
    )
    assert store and nixl and mooncake
    assert store.prefill("t") is store.decode("t", None, SOURCE, None) is None
    assert nixl.decode("t", {"remote_block_ids": [1]}, SOURCE, None) == {"remote_block_ids": [1]}
    with pytest.raises(ValueError, match="did not say"):
        nixl.decode("t", None, SOURCE, None)
    assert mooncake.prefill("t") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "t",
    }
    told = mooncake.decode("t", None, replace(SOURCE, labels={"kv_bootstrap": "10.0.0.2:1"}), 3)
    assert told == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_engine_id": "kv-p_dp3",
        "remote_bootstrap_addr": "http://10.0.0.2:1",
    }
    assert mooncake.decode("t", None, SOURCE, None)["remote_bootstrap_addr"] == "http://10.0.0.1:8998"
    assert handoff_of("OffloadingConnector") is None and "LMCache*" in known_connectors()


def test_connectors_read_the_parameters_that_they_are_sent() -> None:
    """By the sources of the vLLM that is installed: a renamed parameter would make every transfer a recomputation."""
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    folder = base.__file__.rpartition("/")[0]
    for name, file in (
        ("NixlConnector", "nixl/pull_scheduler.py"),
        ("MooncakeConnector", "mooncake/mooncake_connector.py"),
    ):
        assert name in KVConnectorFactory._registry
        handoff = handoff_of(name)
        assert handoff is not None
        sent = {**(handoff.prefill("t") or {}), **(handoff.decode("t", {"remote_host": ""}, SOURCE, 0) or {})}
        with open(f"{folder}/{file}") as source:
            text = source.read()
        assert [key for key in sent if f'"{key}"' not in text and f"{key}=" not in text] == []
    assert inspect.isclass(base.KVConnectorBase_V1)


def test_the_first_choice_of_roles() -> None:
    engines = [Role.BOTH, Role.PREFILL, Role.DECODE]
    assert fit_for(Stage.WHOLE, engines, str) == [Role.BOTH, Role.DECODE]
    assert fit_for(Stage.PREFILL, engines, str) == [Role.PREFILL]
    assert fit_for(Stage.PREFILL, [Role.BOTH], str) == []
    assert fit_for(Stage.WHOLE, [Role.PREFILL], str) == [Role.PREFILL]
    assert fit_for(Stage.DECODE, [Role.PREFILL], str) == []


async def test_engines_of_a_list_tell_their_roles_themselves() -> None:
    first, second = await engine("p", "prefill").start(), await engine("d", "decode").start()
    listed = [
        replace(endpoint(e), model="", role="both", kv_connector="", kv_engine_id="") for e in (first, second)
    ]
    try:
        async with aclosing(ToldBySelf(StaticSource(listed), "http2").watch()) as snapshots:
            told = {e.engine_id: e for e in (await anext(snapshots)).endpoints}
        assert {name: (e.model, e.role, e.kv_connector, e.kv_engine_id) for name, e in told.items()} == {
            "p": ("tiny", "prefill", "NixlConnector", "kv-p"),
            "d": ("tiny", "decode", "NixlConnector", "kv-d"),
        }
    finally:
        await asyncio.gather(first.stop(), second.stop())
