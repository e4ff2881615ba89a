"""Engines that refuse, die, freeze or vanish under a real gateway process."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest

from tests.fakes.engine import Script
from tests.fakes.fleet import Fleet, wait_until
from tests.fakes.tokenizer import load

CODE = grpc.StatusCode


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)


def script_alpha(fleet: Fleet, text: str = "abcdefgh", faults: int | None = 1, **script: Any) -> None:
    """Both engines of alpha answer ``text``; together they show the scripted fault ``faults`` times."""
    answer = load(fleet.tokenizer_dir).encode(text).ids
    left = None if faults is None else [faults]
    for engine in fleet.alpha:
        engine.script = Script(answer=lambda prompt: answer, faults_left=left, **script)


def calls(fleet: Fleet) -> int:
    """Generate calls that the engines of alpha have seen."""
    return sum(len(engine.seen) for engine in fleet.alpha)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(model="alpha", prompt="x", max_tokens=20, **more)


def text_of(stream: Any) -> str:
    return "".join(part.choices[0].text for part in stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        {"refuse": (CODE.UNAVAILABLE, "draining")},
        {"refuse": (CODE.RESOURCE_EXHAUSTED, "full")},
        {"fail_after": 0},
        {"die_after": 0},
    ],
    ids=["unavailable", "full", "engine core dead", "killed"],
)
def test_nothing_sent_yet_means_another_engine(
    fleet: Fleet, client: openai.OpenAI, fault: dict[str, Any], stream: bool
) -> None:
    script_alpha(fleet, **fault)
    made = ask(client, stream=stream)
    assert (text_of(made) if stream else made.choices[0].text) == "abcdefgh"
    assert calls(fleet) == 2


@pytest.mark.parametrize("fault", [{"fail_after": 3}, {"die_after": 3}], ids=["engine core dead", "killed"])
def test_a_stream_that_broke_ends_with_an_error_event(
    fleet: Fleet, client: openai.OpenAI, fault: dict[str, Any]
) -> None:
    script_alpha(fleet, token_delay_s=0.02, **fault)
    got = ""
    with pytest.raises(openai.APIError, match="lost after 3 tokens"):
        for part in ask(client, stream=True):
            got += part.choices[0].text
    assert got and "abc".startswith(got)  # the last token may fall to the error that follows it
    assert calls(fleet) == 1


@pytest.mark.parametrize("fault", [{"fail_after": 3}, {"die_after": 3}], ids=["engine core dead", "killed"])
@pytest.mark.parametrize(
    ("more", "text", "finish"),
    [({}, "abcdefgh", "stop"), ({"stop": ["de"]}, "abc", "stop"), ({"max_tokens": 5}, "abcde", "length")],
    ids=["whole", "stop string across the seam", "length"],
)
def test_a_greedy_stream_goes_on_with_the_other_engine(
    fleet: Fleet, client: openai.OpenAI, fault: dict[str, Any], more: dict[str, Any], text: str, finish: str
) -> None:
    script_alpha(fleet, token_delay_s=0.02, **fault)
    answer = load(fleet.tokenizer_dir).encode("abcdefgh").ids
    for (
        engine
    ) in fleet.alpha:  # what is said depends on how much of it stands behind the prompt, one token long
        engine.script.answer = lambda prompt: answer[len(prompt) - 1 :]
    got, finished, usage = "", None, None
    values = {"max_tokens": 20, "temperature": 0.0, "stream_options": {"include_usage": True}, **more}
    for part in client.completions.create(model="alpha", prompt="x", stream=True, **values):
        usage = part.usage or usage
        for choice in part.choices:
            got += choice.text
            finished = choice.finish_reason or finished
    assert (got, finished) == (text, finish)
    assert usage is not None and usage.prompt_tokens == 1
    if "stop" not in more:  # where a stop string ends it, the tokens that the engine was ahead count too
        assert usage.completion_tokens == len(text) + (finish == "stop")  # with the end token
    assert calls(fleet) == 2


@pytest.mark.parametrize("more", [{}, {"stop": ["zzz"]}], ids=["one piece", "streamed for a stop string"])
def test_an_answer_in_one_piece_is_begun_anew_elsewhere(
    fleet: Fleet, client: openai.OpenAI, more: dict[str, Any]
) -> None:
    script_alpha(fleet, token_delay_s=0.01, die_after=3)
    assert ask(client, **more).choices[0].text == "abcdefgh"
    assert calls(fleet) == 2


def test_an_engine_that_breaks_every_time_gives_a_502_after_two(fleet: Fleet, client: openai.OpenAI) -> None:
    script_alpha(fleet, faults=None, fail_after=0)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code == 502
    assert "failed while it had this request" in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)
    assert calls(fleet) == 2


def test_what_the_request_got_wrong_is_not_retried(fleet: Fleet, client: openai.OpenAI) -> None:
    script_alpha(fleet, faults=None, refuse=(CODE.INVALID_ARGUMENT, "min_p is not offered by this engine"))
    with pytest.raises(openai.BadRequestError, match="min_p is not offered"):
        ask(client)
    assert calls(fleet) == 1


def test_a_failing_choice_ends_the_whole_request_and_its_siblings(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    script_alpha(fleet, text="a" * 200, token_delay_s=0.02, fail_after=3)
    with pytest.raises(openai.APIError, match="lost after 3 tokens"):
        for _ in client.completions.create(model="alpha", prompt="x", max_tokens=200, n=3, stream=True):
            pass
    seen = [call for engine in fleet.alpha for call in engine.seen]
    assert len(seen) == 3
    wait_until(lambda: sum(call.cancelled for call in seen) == 2, "the other two calls to be cancelled")
    assert ask(client).choices[0].text == "a" * 20


def test_a_silent_engine_is_given_up(fleet: Fleet, client: openai.OpenAI) -> None:
    script_alpha(fleet, freeze_after=2)
    with pytest.raises(openai.APIError, match="went silent for 2 s after 2 tokens"):
        for _ in ask(client, stream=True):
            pass
    seen = [call for engine in fleet.alpha for call in engine.seen]
    wait_until(lambda: seen[0].cancelled, "the frozen call to be cancelled")


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_cancels_its_calls(fleet: Fleet, n: int) -> None:
    script_alpha(fleet, text="a" * 300, token_delay_s=0.02)
    body = {"model": "alpha", "prompt": "x", "max_tokens": 300, "stream": True, "n": n}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: httpx hangs up when nobody holds it
        next(lines)
        wait_until(lambda: sum(len(engine.seen) for engine in fleet.alpha) == n, "all calls to arrive")
    seen = [call for engine in fleet.alpha for call in engine.seen]
    wait_until(lambda: all(call.cancelled for call in seen), "the calls to be cancelled")
    assert max(call.sent for call in seen) < 300


def test_a_client_that_stops_waiting_for_one_piece_cancels_too(fleet: Fleet) -> None:
    script_alpha(fleet, text="a" * 300, token_delay_s=0.02)
    body = {"model": "alpha", "prompt": "x", "max_tokens": 300}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=0.5)
    seen = [call for engine in fleet.alpha for call in engine.seen]
    wait_until(lambda: bool(seen) and seen[0].cancelled, "the call to be cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_without_engines_it_is_a_503_that_says_when_to_come_back(
    fleet: Fleet, client: openai.OpenAI, stream: bool
) -> None:
    fleet.stop(*fleet.alpha)
    fleet.wait_engines(alpha=0)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, stream=stream)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert client.completions.create(model="beta", prompt="x", max_tokens=1).choices[0].text == "x"


def test_health_follows_the_engines(fleet: Fleet) -> None:
    assert httpx.get(f"{fleet.url}/health").status_code == 200
    fleet.stop(*fleet.engines)
    fleet.wait_engines(alpha=0, beta=0)
    answer = httpx.get(f"{fleet.url}/health")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    fleet.reset()
    assert httpx.get(f"{fleet.url}/health").status_code == 200


def test_an_engine_that_aborts_says_so(fleet: Fleet, client: openai.OpenAI) -> None:
    script_alpha(fleet, faults=None, finish_reason="abort")
    assert ask(client).choices[0].finish_reason == "abort"


def test_an_engine_that_reports_an_error_gives_a_500(fleet: Fleet, client: openai.OpenAI) -> None:
    script_alpha(fleet, faults=None, finish_reason="error")
    with pytest.raises(openai.InternalServerError):
        ask(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_timeout_ends_its_request_on_the_engine(fleet: Fleet, stream: bool) -> None:
    for engine in fleet.alpha:
        engine.script.first_delay_s = 30
    body = {"model": "alpha", "prompt": "x", "max_tokens": 2, "stream": stream}
    answer = httpx.post(
        f"{fleet.url}/v1/completions", json=body, headers={"x-request-timeout": "0.5"}, timeout=30
    )
    if stream:
        assert "not whole in time" in answer.text and answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 504, answer.text
    wait_until(
        lambda: any(seen.cancelled for engine in fleet.alpha for seen in engine.seen), "the engine's end"
    )


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf"])
def test_a_timeout_that_is_none_is_refused(fleet: Fleet, given: str) -> None:
    body = {"model": "alpha", "prompt": "x"}
    answer = httpx.post(
        f"{fleet.url}/v1/completions", json=body, headers={"x-request-timeout": given}, timeout=30
    )
    assert answer.status_code == 400 and "X-Request-Timeout" in answer.text
