"""The OpenAI API through a real gateway process, over fake engines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from tests.fakes.engine import Script, rank_of
from tests.fakes.fleet import Fleet
from tests.fakes.tokenizer import load

MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.fixture
def client(fleet: Fleet) -> OpenAI:
    return OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)


def ids(fleet: Fleet, text: str) -> list[int]:
    """Token ids of ``text``."""
    return load(fleet.tokenizer_dir).encode(text).ids


def answer_with(fleet: Fleet, text: str) -> None:
    """All engines of alpha answer with ``text``."""
    for engine in fleet.alpha:
        engine.script.answer = lambda prompt: ids(fleet, text)


def only_call(fleet: Fleet):
    """The one Generate call that the engines of alpha have seen."""
    calls = [seen for engine in fleet.alpha for seen in engine.seen]
    assert len(calls) == 1
    return calls[0]


def test_chat_answers_with_the_engines_text(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "Paris is it.")
    answer = client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=50)
    choice = answer.choices[0]
    assert choice.message.content == "Paris is it."
    assert choice.finish_reason == "stop"
    prompt = list(only_call(fleet).request.tokenized.input_ids)
    assert prompt == ids(fleet, "<|user|>hi there<|assistant|>")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("Paris is it.") + 1  # the end token counts, as in vLLM


def test_chat_streams_token_by_token_and_ends_without_the_stop_token(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "abc")
    parts = list(client.chat.completions.create(model="alpha", messages=MESSAGES, stream=True))
    text = [part.choices[0].delta.content for part in parts if part.choices[0].delta.content]
    assert "".join(text) == "abc"
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["stop"]


def test_the_last_token_and_the_length_stop_come_together(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "abcdefgh")
    for engine in fleet.alpha:
        engine.script.token_delay_s = 0.05  # or they would come as one
    parts = list(client.completions.create(model="alpha", prompt="x", stream=True, max_tokens=3))
    assert "".join(part.choices[0].text for part in parts) == "abc"
    last = parts[-1].choices[0]
    assert (last.text, last.finish_reason) == ("c", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_stay_in_the_gateway_and_end_the_call(
    fleet: Fleet, client: OpenAI, stream: bool
) -> None:
    answer_with(fleet, "one two three four")
    for engine in fleet.alpha:
        engine.script.token_delay_s = 0.01
    made = client.completions.create(model="alpha", prompt="x", stop=["three"], stream=stream, max_tokens=60)
    if stream:
        parts = list(made)
        text, reason = "".join(part.choices[0].text for part in parts), parts[-1].choices[0].finish_reason
    else:
        text, reason = made.choices[0].text, made.choices[0].finish_reason
    assert (text, reason) == ("one two ", "stop")
    assert not only_call(fleet).request.sampling_params.stop
    assert only_call(fleet).request.stream


def test_a_stop_token_id_is_named_as_the_reason(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "ab")
    made = client.completions.create(
        model="alpha", prompt="x", max_tokens=9, extra_body={"stop_token_ids": ids(fleet, "z")}
    )
    assert list(only_call(fleet).request.sampling_params.stop_token_ids) == ids(fleet, "z")
    assert made.choices[0].finish_reason == "stop"


def test_n_choices_are_single_calls_merged_by_index(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "hey")
    made = client.completions.create(model="alpha", prompt="x", n=3, temperature=1.0, seed=11, max_tokens=2)
    assert [(choice.index, choice.text) for choice in made.choices] == [(0, "he"), (1, "he"), (2, "he")]
    calls = [seen.request.sampling_params for engine in fleet.alpha for seen in engine.seen]
    assert [call.n for call in calls] == [1, 1, 1]
    assert {call.seed for call in calls} == {11, 12, 13}  # one seed per choice, as vLLM derives them


def test_logprobs_keep_values_order_and_the_chosen_token(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "abc")
    made = client.chat.completions.create(
        model="alpha", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = made.choices[0].logprobs.content
    assert [token.token for token in tokens] == ["a", "b", "c"]
    for token in tokens:
        token_id = ids(fleet, token.token)[0]
        assert token.logprob == -0.25 * rank_of(token_id)
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) >= 2
    assert only_call(fleet).fields == {"logprob_ranks": True}


def test_prompt_logprobs_carry_ranks(fleet: Fleet, client: OpenAI) -> None:
    made = client.completions.create(
        model="alpha", prompt="abc", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    entries = made.choices[0].prompt_logprobs
    assert entries[0] is None
    for token_id, entry in zip(ids(fleet, "abc")[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["rank"] == rank_of(token_id)
        assert {value["rank"] for value in entry.values()} == {1, rank_of(token_id)}


def test_a_json_schema_reaches_the_engine(fleet: Fleet, client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer_with(fleet, '{"city": "Paris"}')
    made = client.chat.completions.create(
        model="alpha",
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    assert json.loads(made.choices[0].message.content) == {"city": "Paris"}
    assert json.loads(only_call(fleet).request.sampling_params.json_schema) == schema


def test_fields_without_a_place_in_the_message_travel_in_the_extension(fleet: Fleet, client: OpenAI) -> None:
    extra = {"bad_words": ["no"], "cache_salt": "tenant", "priority": 4, "allowed_token_ids": [65, 66]}
    client.completions.create(model="alpha", prompt="x", max_tokens=1, seed=2**40, extra_body=extra)
    assert only_call(fleet).fields == {**extra, "seed": 2**40}


def test_ordinary_requests_carry_no_extension(fleet: Fleet, client: OpenAI) -> None:
    client.completions.create(model="alpha", prompt="x", max_tokens=1, temperature=0.5, top_p=0.5, seed=3)
    call = only_call(fleet)
    assert call.fields == {}
    params = call.request.sampling_params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.5, 3, 1)


def test_each_model_has_its_engines_and_models_lists_all(fleet: Fleet, client: OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["alpha", "beta"]
    assert client.models.retrieve("beta").id == "beta"
    client.completions.create(model="beta", prompt="x", max_tokens=1)
    assert [len(engine.seen) for engine in fleet.engines] == [0, 0, 1]


def test_load_is_spread_over_the_engines_of_a_model() -> None:
    """By a gateway that has learnt nothing yet of engines that were slow."""
    fresh = Fleet()
    try:
        fresh.wait_loaded()
        client = OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0, timeout=60)
        for engine in fresh.alpha:
            engine.script.first_delay_s = 0.5
        with ThreadPoolExecutor(24) as pool:
            calls = [
                pool.submit(
                    client.completions.create, model="alpha", prompt=f"{i} " + "x " * 200, max_tokens=1
                )
                for i in range(24)
            ]
            assert all(call.result().choices for call in calls)
        assert min(len(engine.seen) for engine in fresh.alpha) >= 2
    finally:
        fresh.close()


def test_the_responses_api_answers(fleet: Fleet, client: OpenAI) -> None:
    answer_with(fleet, "yes")
    assert client.responses.create(model="alpha", input="hello").output_text == "yes"


def test_metrics_hold_vllms_series_per_model(fleet: Fleet, client: OpenAI) -> None:
    before = fleet.metric("vllm:generation_tokens_total", model_name="alpha")
    finished = fleet.metric("vllm:request_success_total", model_name="alpha", finished_reason="length")
    client.completions.create(model="alpha", prompt="x" * 5, max_tokens=4)
    assert fleet.metric("vllm:generation_tokens_total", model_name="alpha") == before + 4
    assert (
        fleet.metric("vllm:request_success_total", model_name="alpha", finished_reason="length")
        == finished + 1
    )
    text = httpx.get(f"{fleet.url}/metrics").text
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count"):
        assert f'{name}{{model_name="alpha"}}' in text
    assert fleet.metric("npufleet_gateway_engine_calls_total", model_name="alpha", code="OK") > 0


def test_chunks_of_several_tokens_give_the_same_text(fleet: Fleet, client: OpenAI) -> None:
    for engine in fleet.alpha:
        engine.script = Script(tokens_per_chunk=3)
    answer_with(fleet, "abcdefgh")
    parts = list(client.completions.create(model="alpha", prompt="x", stream=True, max_tokens=20))
    assert "".join(part.choices[0].text for part in parts) == "abcdefgh"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_a_request_keeps_its_id_and_its_trace_reaches_the_engine(fleet: Fleet) -> None:
    body = {"model": "alpha", "prompt": "x", "max_tokens": 1}
    trace = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
    headers = {"x-request-id": "mine-7", "traceparent": trace}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    assert "mine-7" in answer.json()["id"]
    call = only_call(fleet)
    assert "mine-7" in call.request.request_id
    assert call.metadata["traceparent"] == trace
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers={"x-request-id": "a b"}, timeout=30)
    assert answer.headers["x-request-id"].startswith("req-")
