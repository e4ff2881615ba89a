"""Prefill and decode engines through `npufleet serve`: one computes a prompt, the other goes on from its KV blocks.

vLLM's example connector carries the blocks through a folder. The model is a tiny llama with random weights in float32;
its tokens are compared with those of transformers, which computes a prompt in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.parity.checkpoints import VOCAB
from tests.parity.reference import greedy, load, prompts

from .ask import ask
from .fleet import Fleet
from .models import SETTINGS, checkpoint

STEPS = 24
LEAST = 129  # a block, and the token that is computed anyway
PROMPTS = prompts(VOCAB)[1:]  # the example connector miscounts a prompt of one token

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    # The connector stores a prompt in one piece, so a step must hold the longest one.
    engine = {**SETTINGS, "max_num_batched_tokens": 512, "kv_transfer_config": transfer}
    common = {"source": str(model), "engine": engine}
    config = {
        "name": "split",
        "device": "virtual",
        "models": [
            {"name": "chat", "role": "decode", **common},
            {"name": "chat-prompts", "role": "prefill", "serves": "chat", **common},
        ],
        "router": {"split_tokens": LEAST},
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(config))
    made = Fleet(log=tmp_path / "log", target=str(file), engines=2)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def splits(fleet: Fleet) -> float:
    text = httpx.get(f"{fleet.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("npufleet_router_splits_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="split"' in line)


def test_two_engines_answer_as_one(fleet: Fleet, model: Path, tmp_path: Path) -> None:
    reference = load(model)
    expected = [greedy(reference, prompt, STEPS).tokens for prompt in PROMPTS]
    told = [ask(fleet, prompt, STEPS) for prompt in PROMPTS]
    assert [tuple(answer.output_ids) for answer in told] == expected
    long = [prompt for prompt in PROMPTS if len(prompt) >= LEAST]
    assert long and splits(fleet) == len(long)
    loaded = [answer.cached_tokens for answer, prompt in zip(told, PROMPTS, strict=True) if prompt in long]
    assert all(tokens >= LEAST - 1 for tokens in loaded), (
        "the second engine loads what the first one computed"
    )
    assert list((tmp_path / "kv").rglob("*.safetensors"))

    fresh = [(7 * at + 3) % VOCAB for at in range(200)]
    body = {"model": "chat", "prompt": fresh, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{fleet.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=240)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == list(greedy(reference, fresh, STEPS).tokens)
    assert splits(fleet) == len(long) + 1
    names = [card["id"] for card in httpx.get(f"{fleet.url}/v1/models", timeout=30).json()["data"]]
    assert names == ["chat"], "clients see one model"
