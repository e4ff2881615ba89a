"""Placed shared experts in quantized checkpoints, in half precision, and behind a gate of their own (Qwen2-MoE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from . import quantized
from .checkpoints import BY_NAME, GATED_CHECKPOINT, VOCAB, write
from .conftest import STEPS, assert_answers_twice
from .engines import GRAPHS, engine, greedy, tokens, worker_engine
from .reference import load, prompts, token_logprobs
from .replicas import REPLICAS, run_replicas
from .test_parity_bfloat16 import FACTOR, scores
from .test_parity_quantized import BFLOAT16, check
from .test_parity_shared_experts import A3, BESIDE, SPLIT, SPREAD, WHOLE, WIDE, asked

pytestmark = pytest.mark.slow
SHORT = 16
RANKS = {"shared_expert_ranks": 2}


def answers_and_scores(llm: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prompts with their greedy answers, and the engine's log probabilities of all of that."""
    answers = tokens(greedy(llm, prompts(VOCAB), SHORT))
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts(VOCAB), answers, strict=True)]
    return sequences, scores(llm, sequences)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek-v3-moe", {**SPREAD, **asked(**WHOLE, **BESIDE, moe_communication="mc2")}),
        ("deepseek-v3-moe", asked(**WHOLE)),
        ("glm4-moe", {**SPREAD, **asked(**SPLIT, **BESIDE)}),
    ],
    ids=["whole-beside-mc2", "whole-sliced-experts", "split-beside"],
)
def test_int8_on_two_ranks(name, settings, checkpoint_path: Callable[[str], Path], bfloat16_table):
    """Shared and routed experts of int8."""
    made = quantized.write_w8a8_dynamic(checkpoint_path(name))
    with worker_engine(made.path, 2, **BFLOAT16, **GRAPHS, **settings) as llm:
        sequences, found = answers_and_scores(llm)
    check(found, made, sequences, bfloat16_table)


@pytest.mark.parametrize("way", ["mc2", "all-gather"])
def test_int8_on_ranks_of_their_own(way, tmp_path, monkeypatch, bfloat16_table):
    monkeypatch.setenv("NPUFLEET_DEVICE", A3)  # read by the workers
    plain = BY_NAME["deepseek-v3-moe"]
    wide = replace(plain, name=f"{plain.name}-wide", config={**plain.config, "hidden_size": WIDE})
    made = quantized.write_w8a8_dynamic(write(wide, tmp_path))
    options = asked(**RANKS, moe_communication=way)
    with worker_engine(made.path, 4, **BFLOAT16, **SPREAD, **GRAPHS, **options) as llm:
        sequences, found = answers_and_scores(llm)
    check(found, made, sequences, bfloat16_table)


def assert_as_close(
    path: Path, sequences: list[list[int]], found: list[torch.Tensor], dtype: torch.dtype, table: list[Any]
) -> None:
    """The engine is as far from fp32 as transformers in ``dtype`` is, the few largest errors left out: a token whose
    last expert is chosen by less than a rounding gets another one here or there.
    """

    def scored(dtype: torch.dtype) -> torch.Tensor:
        model = load(path, dtype=dtype)
        return torch.cat([token_logprobs(model, sequence) for sequence in sequences])

    truth = scored(torch.float32)
    ours, theirs = (torch.cat(found) - truth).abs(), (scored(dtype) - truth).abs()
    table.append(
        (path.name, float(ours.mean()), float(ours.max()), float(theirs.mean()), float(theirs.max()))
    )
    assert ours.mean() < FACTOR * theirs.mean()
    assert ours.quantile(0.98) < 2 * FACTOR * theirs.quantile(0.98)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_one_npu(dtype, checkpoint_path: Callable[[str], Path], bfloat16_table):
    """Where vLLM puts them. GLM's decoder layers do not make up for a division that vLLM's layer makes in float16."""
    path = checkpoint_path("glm4-moe")
    with engine(path, dtype=dtype, **GRAPHS) as llm:
        sequences, found = answers_and_scores(llm)
    assert_as_close(path, sequences, found, getattr(torch, dtype), bfloat16_table)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        asked(**WHOLE),
        {**SPREAD, **asked(**SPLIT, **BESIDE)},
        {**SPREAD, **asked(**WHOLE, moe_communication="mc2")},
    ],
    ids=["whole", "split-beside", "whole-mc2"],
)
def test_half_precision_on_two_ranks(settings, dtype, checkpoint_path: Callable[[str], Path], bfloat16_table):
    """float16 divides what shared experts make by the routed experts' factor; nothing may be scaled twice."""
    path = checkpoint_path("glm4-moe")
    with worker_engine(path, 2, dtype=dtype, **GRAPHS, **settings) as llm:
        sequences, found = answers_and_scores(llm)
    assert_as_close(path, sequences, found, getattr(torch, dtype), bfloat16_table)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_ranks_of_their_own(dtype, tmp_path, monkeypatch, bfloat16_table):
    monkeypatch.setenv("NPUFLEET_DEVICE", A3)
    plain = BY_NAME["glm4-moe"]
    path = write(replace(plain, name="glm4-moe-wide", config={**plain.config, "hidden_size": WIDE}), tmp_path)
    options = asked(**RANKS, moe_communication="mc2")
    with worker_engine(path, 4, dtype=dtype, **SPREAD, **GRAPHS, **options) as llm:
        sequences, found = answers_and_scores(llm)
    assert_as_close(path, sequences, found, getattr(torch, dtype), bfloat16_table)


GATED = GATED_CHECKPOINT.name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        asked(**WHOLE),
        {**SPREAD, **asked(**WHOLE, **BESIDE, moe_communication="mc2")},
        {**SPREAD, **asked(**SPLIT, **BESIDE)},
    ],
    ids=["auto", "whole", "whole-beside-mc2", "split-beside"],
)
def test_gated_on_two_ranks(settings, checkpoint_path, references):
    """Each token's gate scales what the shared expert makes, wherever that is computed."""
    with worker_engine(checkpoint_path(GATED), 2, **GRAPHS, **settings) as llm:
        assert_answers_twice(llm, references(GATED))


@pytest.mark.parametrize("options", [SPLIT, {**WHOLE, **BESIDE}], ids=["split", "whole-beside"])
def test_gated_between_replicas(options, checkpoint_path, references):
    settings = {**SPREAD, **GRAPHS, **asked(**options), "tensor_parallel_size": 2}
    found = run_replicas(checkpoint_path(GATED), STEPS, settings)
    expected = [result.tokens for result in references(GATED)]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]


def test_gated_on_ranks_of_their_own(tmp_path, monkeypatch, bfloat16_table):
    monkeypatch.setenv("NPUFLEET_DEVICE", A3)
    narrow = GATED_CHECKPOINT.full_config()
    heads = WIDE // narrow["head_dim"]  # vLLM's layer takes no other size of a head
    wide = {**narrow, "hidden_size": WIDE, "num_attention_heads": heads}
    path = write(replace(GATED_CHECKPOINT, name="gated-wide", config=wide), tmp_path)
    options = asked(**RANKS, moe_communication="mc2")
    with worker_engine(path, 4, dtype="bfloat16", **SPREAD, **GRAPHS, **options) as llm:
        sequences, found = answers_and_scores(llm)
    assert_as_close(path, sequences, found, torch.bfloat16, bfloat16_table)
