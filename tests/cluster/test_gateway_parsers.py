"""Tool calls and reasoning of streams that break and go on with another engine: the client gets the same bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams

from npufleet.cluster.gateway.plain import PlainChat
from npufleet.cluster.router import member
from tests.fakes.tokenizer import make_tokenizer_dir

from . import test_router_resume
from .router_fakes import until
from .test_gateway_plain import BASE
from .test_gateway_shortcut import Front, front
from .test_router_resume import PROMPT, engines, positions, ready, resumed

ANSWERS = {
    "both": '<think>so é</think>\n\nok <tool_call>\n{"name": "f", "arguments": {"x": "日", "n": [1]}}\n</tool_call>',
    "two calls": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"x": "\\n"}}\n</tool_call>',
    "thought alone": "<think>never ends",
    "no call": '<tool_call>\n{"name": "f", "argum</tool_call>x',
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in "fg"
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = AutoTokenizer.from_pretrained(make_tokenizer_dir(tmp_path_factory.mktemp("t") / "tokenizer"))
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return made


@pytest.fixture(autouse=True)
def same_moment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(member, "_LONGEST_HOLD", 0.05)
    monkeypatch.setattr(chat_serving.time, "time", lambda: 1234567890.5)
    yield


async def told(f: Front, tokenizer: Any, parser: Any, length: int, *breaks: int) -> str:
    """The events of a stream that breaks so, without the names that vLLM draws for tool calls."""
    await ready(f.gateway.fleet)
    await until(lambda: f.gateway.core.active == 0)
    f.gateway.fleet.engines[0].breaks[:] = positions(*breaks)
    serving = PlainChat.__new__(PlainChat)
    more = {"engine_client": f.client, "parser_cls": parser, "model_config": None, "shortcuts": True}
    serving.__dict__.update(
        {**BASE, **more}
    )  # vLLM's count of reasoning tokens depends on how deltas are cut
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=length, output_kind=RequestOutputKind.DELTA, skip_special_tokens=False
    )
    stream = serving.chat_completion_stream_generator(
        request, f._outputs(params, False), "c", "m", [], tokenizer, SimpleNamespace()
    )
    events = "".join([event async for event in stream])
    return re.sub(r'"id":"(chatcmpl-tool|call)[^"]*"', '"id":""', events)


def merged(events: str) -> tuple[str, ...]:
    """What is told in order, however it is cut into events."""
    return tuple("".join(re.findall(rf'"{part}":"((?:[^"\\]|\\.)*)"', events)) for part in (
        "reasoning", "content", "name", "arguments", "finish_reason",
    )) + tuple(re.findall(r'"usage":.*|"error":.*', events))  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_parsers_make_of_a_stream_does_not_depend_on_where_it_breaks(
    tokenizer: Any, answer: str, monkeypatch: pytest.MonkeyPatch
):
    said = tokenizer.encode(ANSWERS[answer], add_special_tokens=False)
    monkeypatch.setattr(test_router_resume, "next_token", lambda ids: said[len(ids) - len(PROMPT)])
    parser = ParserManager.get_parser(
        tool_parser_name="hermes", reasoning_parser_name="qwen3", enable_auto_tools=True,
        model_name="m", tokenizer=tokenizer,
    )  # fmt: skip
    async with front(tokenizer, *engines(2)) as f:
        whole = merged(await told(f, tokenizer, parser, len(said)))
        assert any(whole[:4]) and "error" not in whole[-1]
        places = range(1, len(said), 1 if len(said) < 20 else 3)
        for where in places:
            assert merged(await told(f, tokenizer, parser, len(said), where)) == whole, where
        assert resumed(f.gateway.fleet, "resumed") == len(places)
