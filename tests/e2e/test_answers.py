"""What the `openai` client gets from the fleet."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from .fleet import MODEL, Fleet

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story about a lighthouse."}]


def test_chat_knows_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32)
    assert "Paris" in str(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.model == MODEL


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_streaming_gives_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**settings).choices[0].message.content
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options=options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_completions_and_stop_strings(client: openai.OpenAI) -> None:
    settings: Any = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6, 7,", "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**settings).choices[0].text
    assert "9" in free
    stopped = client.completions.create(**settings, stop=["9"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index("9")]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert len(tokens) == 6
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy: the sampled one is the likeliest
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_a_seed_repeats_the_draw(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=STORY, temperature=1.0, max_tokens=16, seed=seed
        )
        return answer.choices[0].message.content

    first = draw(7)
    assert draw(7) == first
    assert len({first, draw(8), draw(9), draw(10)}) > 1


def test_n_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=1.0, max_tokens=12, n=3, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_json_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": schema}},
    )
    town = json.loads(str(answer.choices[0].message.content))
    assert set(town) == {"city", "big"}
    assert isinstance(town["big"], bool)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.chat.completions.create(model="gpt-none", messages=FRANCE)


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=MODEL, prompt="word " * 4000, max_tokens=4)


def test_a_megabyte_of_prompt_hurts_nobody(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x" * (1 << 20), max_tokens=4)
    test_chat_knows_paris(client)


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": "many"}, {"temperature": -1}, {"messages": "hello"}, {"n": 0}, {"top_logprobs": 5}],
    ids=str,
)
def test_wrong_values_are_refused(fleet: Fleet, change: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 4, **change}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_refused(fleet: Fleet) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", content=b"{nope", headers=headers, timeout=60)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"]


def test_discovery_lists_every_target_and_each_answers(fleet: Fleet) -> None:
    groups = httpx.get(f"http://127.0.0.1:{fleet.metrics}/sd", timeout=10).json()
    by_component: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        by_component.setdefault(group["labels"]["component"], []).append(group)
    assert {name: len(found) for name, found in by_component.items()} == {
        "controller": 1,
        "gateway": 1,
        "engine": 2,
    }
    texts = {}
    for group in groups:
        url = f"http://{group['targets'][0]}{group['labels']['__metrics_path__']}"
        answer = httpx.get(url, timeout=30)
        assert answer.status_code == 200
        texts[group["labels"]["component"]] = answer.text
    assert "vllm:num_requests_running" in texts["engine"]
    assert 'device="virtual npu Ascend910B3"' in texts["engine"]
    assert "npufleet_router_requests" in texts["gateway"]
    assert 'device="virtual"' in texts["gateway"]
    assert 'npufleet_engines{device="virtual"' in texts["controller"]


def test_status_command(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    from npufleet.cluster import cli

    assert cli.main(["status", "--name", fleet.name]) == 0
    assert f"model {MODEL}: 2 of 2 engines ready" in capsys.readouterr().out
