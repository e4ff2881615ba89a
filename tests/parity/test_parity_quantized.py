"""Quantized checkpoints against transformers with the dequantized weights and quantized activations.

Engines run in bfloat16, which the NPU's operators ask for. The truth is fp32 arithmetic over the same quantized
numbers; transformers in bfloat16 over them shows what the number format costs, and how far that moves activations
across the steps of their quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import quantized
from .checkpoints import VOCAB
from .engines import GRAPHS, engine, greedy, tokens, worker_engine
from .quantized import Quantized, quantized_activations
from .reference import load, prompts, token_logprobs
from .test_parity_bfloat16 import scores

FACTOR = 1.5  # the mean error may be this many times that of transformers in bfloat16
BFLOAT16 = {"dtype": "bfloat16"}


def logprobs(made: Quantized, sequences: list[list[int]], dtype: torch.dtype, *, fake: bool) -> torch.Tensor:
    """Log probabilities of the tokens of all sequences by transformers."""
    model = load(made.twin, dtype=dtype)
    if not fake:
        return torch.cat([token_logprobs(model, sequence) for sequence in sequences])
    with quantized_activations(model, made.inputs):
        return torch.cat([token_logprobs(model, sequence) for sequence in sequences])


def check(found: list[torch.Tensor], made: Quantized, sequences: list[list[int]], table: Any) -> None:
    truth = logprobs(made, sequences, torch.float32, fake=True)
    theirs = (logprobs(made, sequences, torch.bfloat16, fake=True) - truth).abs()
    ours = (torch.cat(found) - truth).abs()
    table.append(
        (made.path.name, float(ours.mean()), float(ours.max()), float(theirs.mean()), float(theirs.max()))
    )
    assert ours.mean() < FACTOR * theirs.mean()
    assert ours.max() < 2 * FACTOR * theirs.max()


def graph_equals_eager_and_transformers(made: Quantized, table: Any) -> None:
    with engine(made.path, **BFLOAT16) as llm:
        answers = tokens(greedy(llm, prompts(VOCAB), 48))
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts(VOCAB), answers, strict=True)]
    with engine(made.path, **BFLOAT16, **GRAPHS) as llm:
        assert tokens(greedy(llm, prompts(VOCAB), 48)) == answers
        found = scores(llm, sequences)
    check(found, made, sequences, table)


@pytest.mark.parametrize("name", ["llama-tp", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_w8a8_dynamic(name, checkpoint_path: Callable[[str], Path], bfloat16_table):
    graph_equals_eager_and_transformers(quantized.write_w8a8_dynamic(checkpoint_path(name)), bfloat16_table)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_w8a8_static(symmetric, checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = quantized.write_w8a8_static(checkpoint_path("qwen2"), symmetric=symmetric)
    graph_equals_eager_and_transformers(made, bfloat16_table)


@pytest.mark.slow
def test_w8a8_dynamic_on_two_ranks(checkpoint_path: Callable[[str], Path], bfloat16_table):
    """A rank quantizes its own part of what goes into a row-parallel layer: other roundings, the same size of error."""
    made = quantized.write_w8a8_dynamic(checkpoint_path("llama-tp"))
    found = {}
    for label, mode in (("eager", {}), ("graph", GRAPHS)):
        with worker_engine(made.path, 2, **BFLOAT16, **mode) as llm:
            answers = tokens(greedy(llm, prompts(VOCAB), 48))
            sequences = [[*prompt, *answer] for prompt, answer in zip(prompts(VOCAB), answers, strict=True)]
            found[label] = (answers, scores(llm, sequences))
    assert found["eager"][0] == found["graph"][0]
    check(found["graph"][1], made, sequences, bfloat16_table)
