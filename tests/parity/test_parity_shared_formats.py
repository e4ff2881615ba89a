"""Placed shared experts in quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from . import quantized
from .checkpoints import BY_NAME, VOCAB, write
from .engines import GRAPHS, greedy, tokens, worker_engine
from .reference import prompts
from .test_parity_bfloat16 import scores
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
