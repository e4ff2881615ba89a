"""An answer in one piece that another engine begins anew: what the first one said is in it nowhere."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from transformers import AutoTokenizer
from vllm import envs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from npufleet.cluster.gateway.attempts import _GENERATE
from tests.fakes.tokenizer import make_tokenizer_dir

from .test_gateway_resume import believed_at_once  # noqa: F401 - a fixture
from .test_gateway_shortcut import Front, front
from .test_router_resume import LENGTH, PROMPT, engines, ready


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tokenizer_dir(tmp_path_factory.mktemp("t") / "tokenizer"))


def lost_at_once(f: Front, tokens: list[int]) -> None:
    """The next call is answered with ``tokens``, a message each, and lost, all in one turn of the event loop."""
    channels = [member.channel for member in f.gateway.fleet.router.picker.pool.members()]
    usual = [channel.listen for channel in channels]

    def listen(method: str, request: bytes, *, on_message: Any, **more: Any) -> Any:
        assert method == _GENERATE
        for channel, way in zip(channels, usual, strict=True):
            channel.listen = way  # type: ignore[method-assign]
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def say() -> None:
            for token in tokens:
                chunk = pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=len(PROMPT))
                on_message(pb.GenerateResponse(chunk=chunk).SerializeToString())
            nothing = grpc.aio.Metadata()
            call.set_exception(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing))

        asyncio.get_running_loop().call_soon(say)
        return call

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
        lost_at_once(f, list(whole.token_ids)[:6])
        again = await in_one_piece(f)
        assert list(again.token_ids) == list(whole.token_ids) and again.text == whole.text
