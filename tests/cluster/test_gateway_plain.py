"""Plain streams give the same bytes on vLLM's way and on the shorter one."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import CompletionOutput, RequestOutput

from npufleet.cluster.gateway import plain
from npufleet.cluster.gateway.plain import PlainChat, PlainCompletion

Step = tuple[str, list[int]]
BASE = {
    "parser_cls": None,
    "enable_force_include_usage": False,
    "enable_log_outputs": False,
    "enable_prompt_tokens_details": True,
    "enable_per_request_metrics": False,
    "request_logger": None,
    "system_fingerprint": "print",
    "response_role": "assistant",
    "log_error_stack": False,
    "_include_reasoning_tokens_details": False,
}


def outputs(steps: list[Step], reason: str | None) -> list[RequestOutput]:
    """What the engine client gives for tokens and texts; the last step finishes with ``reason``."""
    made = []
    for number, (text, tokens) in enumerate(steps):
        last = number == len(steps) - 1
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=reason if last else None,
            stop_reason=7 if last and reason == "stop" else None,
        )
        made.append(
            RequestOutput(
                request_id="r",
                prompt="prompt",
                prompt_token_ids=[1, 2, 3],
                prompt_logprobs=None,
                outputs=[output],
                finished=last and reason is not None,
                num_cached_tokens=2,
            )
        )
    return made


async def results(made: list[RequestOutput], error: Exception | None, pairs: bool) -> AsyncIterator[Any]:
    for output in copy.deepcopy(made):
        yield (0, output) if pairs else output
    if error is not None:
        raise error


async def chat_bytes(
    kind: type, fields: dict[str, Any], made: list[RequestOutput], error: Exception | None
) -> str:
    serving = kind.__new__(kind)
    serving.__dict__.update(BASE)
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True, **fields
    )
    metadata = SimpleNamespace()
    stream = serving.chat_completion_stream_generator(
        request, results(made, error, False), 'chatcmpl-"1"', 'a "model"', [], None, metadata
    )
    events = "".join([event async for event in stream])
    return events + str(getattr(metadata, "final_usage_info", None))


async def completion_bytes(
    kind: type, fields: dict[str, Any], made: list[RequestOutput], error: Exception | None
) -> str:
    serving = kind.__new__(kind)
    serving.__dict__.update(BASE)
    request = CompletionRequest(model="m", prompt="x", stream=True, **fields)
    metadata = SimpleNamespace()
    stream = serving.completion_stream_generator(
        request,
        [{}],
        results(made, error, True),
        "cmpl-1",
        123,
        "m",
        num_prompts=1,
        tokenizer=None,
        request_metadata=metadata,
    )
    events = "".join([event async for event in stream])
    return events + str(getattr(metadata, "final_usage_info", None))


@pytest.fixture(autouse=True)
def one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_serving.time, "time", lambda: 1234567890.5)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs each error that it tells a client of


texts = st.one_of(
    st.text(max_size=6), st.sampled_from(["", '"', "\\", "\n", "\x00", "\u2028", '","x":1', "é😀"])
)
steps_strategy = st.lists(st.tuples(texts, st.lists(st.integers(0, 9), max_size=3)), max_size=7)
fields_strategy = st.sampled_from(
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"max_tokens": 5},
    ]
)
reasons = st.sampled_from(["stop", "length", "abort", "error", None])
errors = st.sampled_from(
    [None, GracefulHTTPError("the engine was lost", HTTPStatus.BAD_GATEWAY), ValueError("bad")]
)


@hypothesis_settings(max_examples=40, deadline=None)
@given(steps=steps_strategy, fields=fields_strategy, reason=reasons, error=errors)
async def test_chat_streams_are_byte_equal(steps, fields, reason, error):
    made = outputs(
        steps, reason or (None if error else "length")
    )  # without an error a stream has a last output
    assert await chat_bytes(PlainChat, fields, made, error) == await chat_bytes(
        OpenAIServingChat, fields, made, error
    )


@hypothesis_settings(max_examples=40, deadline=None)
@given(steps=steps_strategy, fields=fields_strategy, reason=reasons, error=errors)
async def test_completion_streams_are_byte_equal(steps, fields, reason, error):
    made = outputs(steps, reason or (None if error else "length"))
    ours = await completion_bytes(PlainCompletion, fields, made, error)
    assert ours == await completion_bytes(OpenAIServingCompletion, fields, made, error)


async def test_the_middle_goes_the_shorter_way(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    monkeypatch.setattr(plain, "to_json", lambda text: written.append(text) or chat_json(text))
    made = outputs([("a", [1]), ("b", [2]), ("c", [3]), ("d", [4])], "stop")
    await chat_bytes(PlainChat, {}, made, None)
    assert written == ["a", "b", "c"]  # the first where it is cut
    written.clear()
    await chat_bytes(PlainChat, {"return_token_ids": True}, made, None)
    assert not written


def chat_json(text: str) -> bytes:
    from pydantic_core import to_json

    return to_json(text)
