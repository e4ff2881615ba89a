"""What a client gets for a request that cannot be served, through a real gateway process."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes.fleet import Fleet

JSON = {"content-type": "application/json"}


def post(fleet: Fleet, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{fleet.url}{path}", json={"model": "alpha", "prompt": "x", **body}, timeout=60)


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    """The answer has this status, OpenAI's error form, and a message with these words."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    for word in words:
        assert word in error["message"]


def test_an_unknown_model_is_a_404_that_names_it(fleet: Fleet) -> None:
    answer = post(fleet, model="gpt-9")
    refused(answer, 404, "gpt-9", "does not exist")
    assert answer.json()["error"]["param"] == "model"


def test_several_models_need_a_name(fleet: Fleet) -> None:
    refused(httpx.post(f"{fleet.url}/v1/completions", json={"prompt": "x"}), 400, "alpha", "beta")


@pytest.mark.parametrize("body", [b"{garbage", b'{"model": "alpha", ', b"\xff\xfe{}", b'"' + b"[" * 5000])
def test_garbage_is_a_400(fleet: Fleet, body: bytes) -> None:
    refused(httpx.post(f"{fleet.url}/v1/completions", content=body, headers=JSON), 400, "not valid JSON")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "many"},
        {"temperature": "hot"},
        {"temperature": 9},
        {"n": -1},
        {"prompt": {"a": 1}},
        {"logit_bias": {"x": 1}},
        {"stop": 5},
        {"model": 7},
        {"prompt": [999999999]},
        {"top_p": 3},
        {"max_tokens": 0},
        {"logprobs": 2000},
    ],
)
def test_wrong_types_and_values_are_a_400(fleet: Fleet, wrong: dict[str, Any]) -> None:
    refused(post(fleet, **wrong), 400)
    assert not [seen for engine in fleet.alpha for seen in engine.seen]


def test_a_prompt_that_is_too_long_is_a_400_with_the_limit(fleet: Fleet) -> None:
    refused(post(fleet, prompt="x" * 600), 400, "512 tokens")
    refused(post(fleet, prompt="x" * (1 << 20)), 400, "512 tokens")


def test_a_body_above_the_limit_is_a_413(fleet: Fleet) -> None:
    refused(post(fleet, prompt="x" * (5 << 20)), 413, str(4 << 20))

    def chunks():
        for _ in range(6):
            yield b" " * (1 << 20)

    refused(httpx.post(f"{fleet.url}/v1/completions", content=chunks(), headers=JSON), 413, str(4 << 20))


def test_a_bad_schema_is_a_400(fleet: Fleet) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "response_format": schema}
    refused(httpx.post(f"{fleet.url}/v1/chat/completions", json=body), 400, "objct")


def test_a_schema_that_refers_to_nothing_but_itself_is_a_400(fleet: Fleet) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "response_format": schema}
    refused(
        httpx.post(f"{fleet.url}/v1/chat/completions", json=body), 400, "no text can satisfy", "$ref at #"
    )
    assert not [seen for engine in fleet.alpha for seen in engine.seen]


def test_a_field_too_large_for_metadata_is_a_400_that_names_it(fleet: Fleet) -> None:
    answer = post(fleet, allowed_token_ids=[100] * 20_000, max_tokens=1)
    refused(answer, 400, "allowed_token_ids", "11264 bytes")


def test_the_largest_extension_that_is_accepted_arrives(fleet: Fleet) -> None:
    ids = [200] * 5000  # two bytes each
    assert post(fleet, allowed_token_ids=ids, max_tokens=1).status_code == 200
    assert [seen.fields for engine in fleet.alpha for seen in engine.seen] == [{"allowed_token_ids": ids}]


@pytest.mark.parametrize(
    "field", [{"bad_words": ["no"]}, {"cache_salt": "t"}, {"priority": 2}, {"seed": 2**40}]
)
def test_a_stock_engine_never_loses_a_field_in_silence(fleet: Fleet, field: dict[str, Any]) -> None:
    refused(post(fleet, model="beta", **field), 400, next(iter(field)))
    assert not fleet.beta.seen


def test_a_stock_engine_gives_logprobs_with_one_alternative_more_asked_for(fleet: Fleet) -> None:
    answer = post(fleet, model="beta", prompt="abcd", logprobs=2, max_tokens=4).json()["choices"][0][
        "logprobs"
    ]
    assert answer["tokens"] == ["a", "b", "c", "d"]
    assert [len(top) in (2, 3) for top in answer["top_logprobs"]] == [True] * 4
    assert fleet.beta.seen[0].request.sampling_params.logprobs == 3


def test_what_the_gateway_does_not_offer_is_a_404(fleet: Fleet) -> None:
    assert post(fleet, path="/v1/embeddings", input="x").status_code == 404
    assert httpx.get(f"{fleet.url}/v1/nothing").status_code == 404


def test_the_gateway_lives_on_after_all_of_it(fleet: Fleet) -> None:
    assert httpx.get(f"{fleet.url}/health").status_code == 200
    assert post(fleet, max_tokens=1).status_code == 200
