"""A KV connector moves whole blocks between engines: what one NPU computed, another continues from."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from .checkpoints import VOCAB
from .engines import GRAPHS, cached, engine, greedy, tokens
from .reference import prompts

NAME = "llama"
STEPS = 32
PROMPTS = prompts(VOCAB)[1:]  # the example connector miscounts a prompt of one token


def with_storage(folder: Path, **settings):
    """Settings of an engine that keeps the KV blocks of prompts as files in ``folder`` (vLLM's example
    connector).
    """
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    # The connector stores a prompt in one piece, so a step must hold the longest one; prefix caching would
    # hide it.
    return {
        "kv_transfer_config": transfer,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        **settings,
    }


@pytest.fixture(scope="module")
def storage(tmp_path_factory, checkpoint_path, references) -> Path:
    """Files written by a first engine, whose own answers are right."""
    folder = tmp_path_factory.mktemp("kv")
    with engine(checkpoint_path(NAME), **with_storage(folder)) as first:
        outputs = greedy(first, PROMPTS, STEPS)
    assert tokens(outputs) == [result.tokens[:STEPS] for result in references(NAME)[1:]]
    assert not any(cached(outputs))
    assert list(folder.rglob("*.safetensors"))
    return folder


@pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
def test_another_engine_continues_from_the_files(mode, storage, checkpoint_path, references):
    with engine(checkpoint_path(NAME), **with_storage(storage, **mode)) as second:
        outputs = greedy(second, PROMPTS, STEPS)
    assert cached(outputs)[-2:] == [128, 256], "the long prompts were expected to be loaded, not computed"
    assert tokens(outputs) == [result.tokens[:STEPS] for result in references(NAME)[1:]]


def test_the_files_are_what_the_answer_comes_from(storage, tmp_path, checkpoint_path, references):
    """The same with values halved in the files: the answer of the loaded prompt changes, so the load is
    real.
    """
    for source in storage.rglob("*.safetensors"):
        target = tmp_path / source.relative_to(storage)
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value * 0.5 for name, value in load_file(source).items()}, target)
    with engine(checkpoint_path(NAME), **with_storage(tmp_path)) as second:
        outputs = greedy(second, PROMPTS, STEPS)
    assert tokens(outputs)[-1] != references(NAME)[-1].tokens[:STEPS]
