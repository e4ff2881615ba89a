"""Quantized checkpoints against transformers with the dequantized weights and quantized activations.

Engines run in bfloat16, which the NPU's operators ask for. The truth is fp32 arithmetic over the same quantized
numbers; transformers in bfloat16 over them shows what the number format costs, and how far that moves activations
across the steps of their quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from . import quantized
from .checkpoints import BY_NAME, VOCAB, write
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


def check(
    found: list[torch.Tensor], made: Quantized, sequences: list[list[int]], table: Any, *, fake: bool = True
) -> None:
    truth = logprobs(made, sequences, torch.float32, fake=fake)
    theirs = (logprobs(made, sequences, torch.bfloat16, fake=fake) - truth).abs()
    ours = (torch.cat(found) - truth).abs()
    table.append(
        (made.path.name, float(ours.mean()), float(ours.max()), float(theirs.mean()), float(theirs.max()))
    )
    assert ours.mean() < FACTOR * theirs.mean()
    assert ours.max() < 2 * FACTOR * theirs.max()


def graph_equals_eager_and_transformers(made: Quantized, table: Any, *, fake: bool = True) -> None:
    with engine(made.path, **BFLOAT16) as llm:
        answers = tokens(greedy(llm, prompts(VOCAB), 48))
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts(VOCAB), answers, strict=True)]
    with engine(made.path, **BFLOAT16, **GRAPHS) as llm:
        assert tokens(greedy(llm, prompts(VOCAB), 48)) == answers
        found = scores(llm, sequences)
    check(found, made, sequences, table, fake=fake)


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


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_modelslim(static, checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = quantized.write_modelslim(checkpoint_path("qwen2"), static=static)
    graph_equals_eager_and_transformers(made, bfloat16_table)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3-moe"])
def test_w8a8_experts(name, checkpoint_path: Callable[[str], Path], bfloat16_table):
    graph_equals_eager_and_transformers(quantized.write_w8a8_dynamic(checkpoint_path(name)), bfloat16_table)


@pytest.mark.slow
def test_modelslim_experts(checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = quantized.write_modelslim(checkpoint_path("qwen3-moe"), static=False)
    graph_equals_eager_and_transformers(made, bfloat16_table)


WHOLE_BLOCKS = {"head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
"""Projections that vLLM joins must begin where a block does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-moe"])
def test_fp8_by_block(name, tmp_path: Path, bfloat16_table):
    """Nothing but the weights is quantized, and these are the checkpoint's numbers rounded to bfloat16."""
    plain = BY_NAME[name]
    checkpoint = replace(plain, name=f"{name}-blocks", config={**plain.config, **WHOLE_BLOCKS})
    made = quantized.write_fp8_block(write(checkpoint, tmp_path))
    graph_equals_eager_and_transformers(made, bfloat16_table, fake=False)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (32, False), (0, True)])
def test_w4a16(group, symmetric, checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = quantized.write_w4a16(checkpoint_path("qwen2"), group=group, symmetric=symmetric)
    graph_equals_eager_and_transformers(made, bfloat16_table, fake=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group", "symmetric"),
    [("qwen3-moe", 32, True), ("deepseek-v3-moe", 32, False), ("mixtral", 0, True)],
)
def test_w4a16_experts(name, group, symmetric, checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = quantized.write_w4a16(checkpoint_path(name), group=group, symmetric=symmetric)
    graph_equals_eager_and_transformers(made, bfloat16_table, fake=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "settings"),
    [
        ("llama-tp", lambda source: quantized.write_w8a8_static(source, symmetric=False), {}),
        ("llama-tp", lambda source: quantized.write_modelslim(source, static=True), {}),
        ("llama-tp", lambda source: quantized.write_w4a16(source, group=32, symmetric=False), {}),
        ("qwen3-moe", quantized.write_w8a8_dynamic, {"enable_expert_parallel": True}),
        ("mixtral", quantized.write_w8a8_dynamic, {}),
        (
            "qwen3-moe",
            lambda source: quantized.write_w4a16(source, group=32, symmetric=True),
            {"enable_expert_parallel": True, "additional_config": {"moe_communication": "mc2"}},
        ),
    ],
    ids=["static-zero", "modelslim-static", "w4a16", "experts-spread", "experts-split", "w4a16-experts-mc2"],
)
def test_two_ranks(name, make, settings, checkpoint_path: Callable[[str], Path], bfloat16_table):
    made = make(checkpoint_path(name))
    with worker_engine(made.path, 2, **BFLOAT16, **GRAPHS, **settings) as llm:
        answers = tokens(greedy(llm, prompts(VOCAB), 16))
        sequences = [[*prompt, *answer] for prompt, answer in zip(prompts(VOCAB), answers, strict=True)]
        found = scores(llm, sequences)
    check(found, made, sequences, bfloat16_table, fake="w4a16" not in made.path.name)
