"""What the gateway does with outputs that come together, and with requests whose engines or frontend go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from transformers import AutoTokenizer
from vllm import envs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from npufleet.cluster.gateway.frontend import Frontend
from npufleet.cluster.gateway.responses import ResponseReader
from tests.fakes.tokenizer import make_tokenizer_dir

from .router_fakes import until
from .test_gateway_resume import believed_at_once  # noqa: F401 - a fixture
from .test_gateway_shortcut import Front, Wire, front, letters  # noqa: F401 - a fixture
from .test_gateway_translate import core_request
from .test_router_resume import LENGTH, PROMPT, engines, ready

Say = Callable[..., None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tokenizer_dir(tmp_path_factory.mktemp("t") / "tokenizer"))


def chunk(*tokens: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=tokens, prompt_tokens=len(PROMPT)))


def played(f: Front, play: Callable[[Say], Awaitable[None]]) -> None:
    """The next call to an engine is answered by ``play``, which is given what takes messages, and then lost."""
    channels = [member.channel for member in f.gateway.fleet.router.picker.pool.members()]
    usual = [channel.listen for channel in channels]

    async def lost(on_message: Callable[[bytes], None]) -> None:
        code, nothing = grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata()
        try:
            await play(lambda *messages: [on_message(each.SerializeToString()) for each in messages])
        except RuntimeError:  # of on_message, as each transport takes it
            code = grpc.StatusCode.INTERNAL
        raise grpc.aio.AioRpcError(code, nothing, nothing)

    def listen(method: str, request: bytes, *, on_message: Any, **more: Any) -> Any:
        for channel, way in zip(channels, usual, strict=True):
            channel.listen = way  # type: ignore[method-assign]
        return asyncio.create_task(lost(on_message))

    for channel in channels:
        channel.listen = listen  # type: ignore[method-assign]


async def in_one_piece(f: Front) -> CompletionOutput:
    await ready(f.gateway.fleet)
    params = SamplingParams(
        temperature=0.0, max_tokens=LENGTH, output_kind=RequestOutputKind.FINAL_ONLY, stop=["never said"]
    )
    return [output async for output in f._outputs(params, False)][-1].outputs[0]


async def test_outputs_that_the_frontend_has_taken_but_not_read_are_forgotten(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    # vLLM lets other tasks run after so many outputs, 128 unless told otherwise.
    monkeypatch.setattr(envs, "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", 1, raising=False)
    async with front(tokenizer, *engines(2)) as f:
        whole = await in_one_piece(f)

        async def play(say: Say) -> None:
            say(*map(chunk, list(whole.token_ids)[:6]))  # and it is lost, all in one turn of the event loop

        played(f, play)
        again = await in_one_piece(f)
        assert list(again.token_ids) == list(whole.token_ids) and again.text == whole.text


async def test_a_fault_beside_the_last_tokens_ends_the_stream_and_is_not_the_engines(tokenizer: Any):
    class Broken(Wire):
        def write(self, data: bytes) -> None:
            raise RuntimeError("no")

    async with front(tokenizer, *engines(2)) as f:
        await ready(f.gateway.fleet)
        wire = Broken()

        async def play(say: Say) -> None:
            say(chunk(65))
            await until(lambda: wire.bodies == 2)
            await asyncio.sleep(0.01)  # the stream's task waits for more
            say(chunk(66), chunk(67))

        played(f, play)
        await f.ask(wire, max_tokens=3)
        assert "the gateway failed: RuntimeError" in "".join(wire.events)
        assert sum(f.gateway.fleet.served()) == 0, (
            "nobody went on without the token that could not be written"
        )


def test_nothing_overtakes_a_message_without_tokens():
    reader = ResponseReader(
        core_request(SamplingParams(max_tokens=9), list(PROMPT)),
        stream=True, ranked=False, max_model_len=4096,
    )  # fmt: skip
    state = {"open": False, "closed": False}
    shortcut: Any = SimpleNamespace(
        is_open=lambda read: state["open"] and not state["closed"],
        put=lambda ids: None,
        flush=lambda: None,
        close=lambda: state.update(closed=True),
    )
    outputs: list[Any] = []
    reader.feed(chunk(), outputs)  # before the first token: the stream's task has seen it with that
    reader.feed(chunk(1), outputs)
    state["open"] = True
    assert reader.shorten(chunk(2), shortcut)
    state["open"] = False  # the connection is full
    assert not reader.shorten(chunk(), shortcut)
    reader.feed(chunk(), outputs)
    state["open"] = True
    assert not reader.shorten(chunk(3), shortcut), "the frontend has not read the one before"


@pytest.mark.parametrize("params", [{}, {"output_kind": RequestOutputKind.FINAL_ONLY}])
async def test_requests_of_a_frontend_that_is_closed_end(tokenizer: Any, params: dict):
    async with front(tokenizer, *engines(1)) as f:
        f.client.renderer.shutdown = lambda: None  # type: ignore[method-assign]
        nothing: Any = SimpleNamespace(close=lambda: None)
        made = Frontend("m", nothing, f.client, f.gateway.core, nothing)
        asking = asyncio.create_task(f.ask(Wire(), -3, **params))
        await until(lambda: [job.tokens for job in f.gateway.core._jobs.values()] == [3] or bool(params))
        await until(lambda: f.gateway.core.active == 1)
        made.close()
        for task in (
            asking,
            asyncio.create_task(f.ask(Wire(), **params)),
        ):  # the second one was rendered meanwhile
            wire = await asyncio.wait_for(task, 10)
            assert "was removed or changed while it had this request" in "".join(wire.events)
        assert f.gateway.core.active == 0
