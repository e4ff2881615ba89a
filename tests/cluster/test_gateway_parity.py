"""The gateway over a real engine answers what vLLM's own OpenAI server answers over the same engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.fleet import START_S, wait_until
from tests.fakes.plain_engine import NAME

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


class Pair:
    """Gateway and plain server over one engine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []
        found = self._start(
            "engine",
            ["-m", "tests.fakes.plain_engine", str(directory / "model")],
            r"engine (\S+) plain (\S+)",
            NPUFLEET_DEVICE="virtual:1:Ascend910B3,hbm=4GiB", OMP_NUM_THREADS="1",
        )  # fmt: skip
        engine, self.plain = found.groups()
        command = ["-m", "npufleet.cluster.gateway", "--engine", f"{NAME}@{engine}", "--set", '{"port": 0}']
        found = self._start(
            "gateway", command, r"gateway listens on (\S+)", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
        )
        self.gateway = found.group(1)
        wait_until(lambda: httpx.get(f"{self.gateway}/health").status_code == 200, "the gateway", START_S)

    def _start(self, name: str, arguments: list[str], ready: str, **environment: str) -> re.Match[str]:
        log = self._directory / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)

        def line() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()[-4000:]
            return re.search(ready, log.read_text())

        wait_until(lambda: line() is not None, f"the {name}: {log.read_text()[-2000:]}", START_S)
        found = line()
        assert found is not None
        return found

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10)

    def both(self, path: str, body: dict[str, Any]) -> tuple[tuple[int, Any], tuple[int, Any]]:
        """Status and comparable content of the gateway's answer, and of the plain server's."""
        return ask(f"{self.gateway}{path}", body), ask(f"{self.plain}{path}", body)


def ask(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One request; streams come back as a list of their events without the empty ones."""
    answer = httpx.post(url, json={"model": NAME, **body}, timeout=TIMEOUT_S)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, clean(answer.json())
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return answer.status_code, merged([clean(json.loads(event)) for event in events[:-1]])


def clean(value: Any) -> Any:
    """Without what differs from answer to answer: ids, times, fingerprints."""
    if isinstance(value, dict):
        skip = {"id", "created", "system_fingerprint", "request_id"}
        return {key: clean(item) for key, item in value.items() if key not in skip}
    return [clean(item) for item in value] if isinstance(value, list) else value


def merged(events: list[Any]) -> dict[str, Any]:
    """A stream's text, logprobs and finish per choice: how tokens are cut into events is not compared."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            into = choices.setdefault(
                choice["index"], {"text": "", "logprobs": [], "finish": None, "stop": None}
            )
            into["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            into["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            into["finish"] = choice.get("finish_reason") or into["finish"]
            into["stop"] = choice.get("stop_reason") or into["stop"]
    usage = [event["usage"] for event in events if event.get("usage")]
    return {"choices": choices, "usage": usage, "errors": [event for event in events if "error" in event]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("parity")
    started = Pair.__new__(Pair)
    try:
        started.__init__(directory)  # type: ignore[misc]  # so that a half-started pair is closed too
        yield started
    finally:
        started.close()


GREEDY = {"temperature": 0, "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled with a seed": {"max_tokens": 12, "temperature": 0.9, "seed": 7},
    "a seed of 64 bits": {"max_tokens": 12, "seed": 2**40 + 7},
    "top p, top k, min p": {"max_tokens": 12, "seed": 7, "top_p": 0.8, "top_k": 9, "min_p": 0.01},
    "penalties": {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logit bias": {**GREEDY, "logit_bias": {"70": 50}},
    "bad words": {**GREEDY, "bad_words": ["a", "b", "c", "d"]},
    "allowed tokens": {**GREEDY, "allowed_token_ids": [65, 66, 67]},
    "min tokens": {**GREEDY, "min_tokens": 10, "logit_bias": {"256": 5}},
    "a stop token": {**GREEDY, "logit_bias": {"256": 100}},
    "a stop token that is kept": {**GREEDY, "logit_bias": {"256": 100}, "include_stop_str_in_output": True},
    "a stop token id": {**GREEDY, "logit_bias": {"70": 100}, "stop_token_ids": [70]},
    "ignoring the end": {**GREEDY, "logit_bias": {"256": 100}, "ignore_eos": True},
    "a stop string": {**GREEDY, "allowed_token_ids": [65], "logit_bias": {"65": 1}, "stop": ["bbb"]},
    "a stop string that is kept": {
        **GREEDY, "allowed_token_ids": [65], "stop": ["bbb"], "include_stop_str_in_output": True,
    },
    "several choices": {"n": 3, "max_tokens": 6, "seed": 3},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2},
    "token ids": {**GREEDY, "return_token_ids": True},
    "a regex": {**GREEDY, "structured_outputs": {"regex": "[ab]{4}"}},
    "a choice": {**GREEDY, "structured_outputs": {"choice": ["yes", "no"]}},
    "a schema": {
        "temperature": 0, "max_tokens": 30,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    },
    "a cache salt": {**GREEDY, "cache_salt": "tenant"},
    "refused: bad temperature": {"temperature": 7},
    "refused: bad regex": {**GREEDY, "structured_outputs": {"regex": "["}},
    "refused: too many logprobs": {**GREEDY, "prompt_logprobs": 500},
    "refused: tokens outside of the vocabulary": {**GREEDY, "allowed_token_ids": [100_000]},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
def test_completions(pair: Pair, case: str, stream: bool) -> None:
    if stream and "prompt_logprobs" in CASES[case]:
        pytest.skip("vLLM does not stream prompt logprobs")
    ours, theirs = pair.both("/v1/completions", {"prompt": "Hello there", "stream": stream, **CASES[case]})
    assert ours == theirs
    status, answer = ours  # a stream that is refused by the engine has begun: its first event is the error
    refused = status == 400 or (stream and bool(answer["errors"]))
    assert refused == case.startswith("refused: ")


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
def test_logprobs_are_vllms_to_the_last_rank(pair: Pair, count: int, stream: bool) -> None:
    body = {"max_tokens": 6, "seed": 5, "temperature": 1.5, "stream": stream}
    ours, theirs = pair.both("/v1/completions", {"prompt": "Hello", "logprobs": count, **body})
    assert ours == theirs
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": count, **body}
    ours, theirs = pair.both("/v1/chat/completions", chat)
    assert ours == theirs


@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
def test_chat(pair: Pair, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **GREEDY}
    if stream:
        body["stream_options"] = {"include_usage": True}
    ours, theirs = pair.both("/v1/chat/completions", body)
    assert ours == theirs


def test_prompts_that_are_too_long(pair: Pair) -> None:
    for prompt in ("x" * 600, "x" * (1 << 20), [70] * 600):
        ours, theirs = pair.both("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert ours == theirs
        assert ours[0] == 400


def test_a_cache_salt_keeps_tenants_apart(pair: Pair) -> None:
    def cached(salt: str) -> int:
        body = {"model": NAME, "prompt": "same prefix " * 30, "max_tokens": 1, "cache_salt": salt}
        httpx.post(f"{pair.gateway}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
        text = httpx.get(f"{pair.gateway}/metrics").text
        found = re.search(r'vllm:prompt_tokens_cached_total\{model_name="tiny"\} (\S+)', text)
        assert found is not None
        return int(float(found.group(1)))

    first = cached("a")
    assert cached("b") == first  # another tenant finds nothing
    assert cached("a") > first
