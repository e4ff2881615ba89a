"""Greedy tokens of the plugin on an NPU against Hugging Face transformers, fp32, in eager and in graph mode.

Each checkpoint has one engine per mode. A step takes at most 64 tokens, so the longer prompts are prefilled
in chunks next to requests that already decode.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm import LLM

from .checkpoints import CHECKPOINTS, VOCAB
from .conftest import LOGPROB_TOLERANCE, STEPS, in_both_modes
from .engines import GRAPHS, cached, engine, greedy, logprob_error, tokens
from .reference import greedy as hf_greedy
from .reference import load, prompts

NAMES = [checkpoint.name for checkpoint in CHECKPOINTS]


@pytest.fixture(scope="module", params=in_both_modes(NAMES, eager=("llama", "gemma3", "mixtral")))
def served(request, checkpoint_path) -> Iterator[tuple[str, str, LLM]]:
    """(checkpoint name, mode, engine)."""
    name, mode = request.param
    with engine(checkpoint_path(name), **(GRAPHS if mode == "graph" else {})) as llm:
        yield name, mode, llm


def test_mixed_batch_with_chunked_prefill(served, references):
    name, _, llm = served
    expected = references(name)
    outputs = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
    assert tokens(outputs) == [result.tokens for result in expected]
    for output, result in zip(outputs, expected, strict=True):
        assert logprob_error(output, result.logprobs) < LOGPROB_TOLERANCE


def test_prefix_cache_hit(served, references):
    """The same prompts again: the long ones start from cached blocks and must not answer differently."""
    name, _, llm = served
    expected = [result.tokens for result in references(name)]
    greedy(llm, prompts(VOCAB), 1)
    outputs = greedy(llm, prompts(VOCAB), STEPS)
    assert cached(outputs)[-2:] == [128, 256], (
        "the long prompts were expected to find their prefix in the cache"
    )
    assert tokens(outputs) == expected


def test_shared_prefix_with_another_ending(served, checkpoint_path):
    """A prompt that continues an earlier one, decoded from the cached part."""
    name, _, llm = served
    base = prompts(VOCAB)[-2]
    forked = [*base, *prompts(VOCAB, lengths=(20,), seed=11)[0]]
    greedy(llm, [base], 1)
    (output,) = greedy(llm, [forked], 24)
    assert cached([output]) == [128]
    assert tokens([output])[0] == hf_greedy(load(checkpoint_path(name)), forked, 24).tokens


def test_graph_mode_really_replays(served):
    """Graphs were captured for the decode sizes in graph mode, and none in eager mode."""
    _, mode, llm = served
    config = llm.llm_engine.vllm_config.compilation_config
    assert config.cudagraph_mode.has_full_cudagraphs() is (mode == "graph")
