"""Decode steps whose first part is one operator, in DeepSeek V3's sizes: bfloat16 and int8 against transformers.

Tokens may differ in bfloat16, so the tests score the engine's own answers with transformers in fp32. How far bfloat16
brings transformers itself from that says what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput

from npufleet.kernels.virtual import counters

from . import quantized
from .checkpoints import PROLOG_CHECKPOINT, VOCAB
from .engines import GRAPHS, cached, engine, greedy, worker_engine
from .quantized import Quantized, quantized_activations
from .reference import load, prompts, token_logprobs

NAME = PROLOG_CHECKPOINT.name
LAYERS = PROLOG_CHECKPOINT.config["num_hidden_layers"]
STEPS = 24
FACTOR = 1.5  # as in test_parity_bfloat16
OPERATOR, SEPARATE = "npu::npu_mla_prolog_v3", "npu::npu_kv_rmsnorm_rope_cache"
MODES = pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
pytestmark = pytest.mark.slow


def answer(llm: LLM, batch: Sequence[Sequence[int]]) -> tuple[list[RequestOutput], dict[str, int]]:
    """Greedy answers with log probabilities, and the device operations that they took."""
    counters.reset()
    outputs = greedy(llm, batch, STEPS, logprobs=1)
    return outputs, counters.read().ops


def assert_operators(ops: dict[str, int], *, graph: bool) -> None:
    """Steps with prefills take separate operators, the others one; a replayed step calls nothing."""
    assert ops[SEPARATE] > 0
    if graph:
        assert OPERATOR not in ops
    else:
        assert ops[OPERATOR] % LAYERS == 0 and ops[OPERATOR] >= LAYERS * STEPS // 2


def scored(made: Quantized | Path, sequences: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Log probabilities of each sequence's last tokens by transformers."""
    if isinstance(made, Path):
        model = load(made, dtype=dtype)
        return torch.cat([token_logprobs(model, sequence)[-STEPS:] for sequence in sequences])
    model = load(made.twin, dtype=dtype)
    with quantized_activations(model, made.inputs):
        return torch.cat([token_logprobs(model, sequence)[-STEPS:] for sequence in sequences])


def assert_as_close_as_bfloat16(
    outputs: Sequence[RequestOutput], made: Quantized | Path, table: list[Any], what: str
) -> None:
    """The log probabilities of the answers, all of them of decode steps but the first, against fp32."""
    found, sequences = [], []
    for output in outputs:
        (one,) = output.outputs
        assert output.prompt_token_ids is not None and one.logprobs is not None
        sequences.append([*output.prompt_token_ids, *one.token_ids])
        found += [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
    truth = scored(made, sequences, torch.float32)
    ours = (torch.tensor(found) - truth).abs()
    theirs = (scored(made, sequences, torch.bfloat16) - truth).abs()
    table.append((what, float(ours.mean()), float(ours.max()), float(theirs.mean()), float(theirs.max())))
    assert ours.mean() < FACTOR * theirs.mean()
    assert ours.max() < 2 * FACTOR * theirs.max()


@MODES
def test_decode_after_prefill(mode, checkpoint_path: Callable[[str], Path], bfloat16_table):
    """Chunked prefills next to decodes, steps of decodes alone, then the same prompts from the prefix cache, which
    attend over latents that either way has written.
    """
    path, batch = checkpoint_path(NAME), prompts(VOCAB)
    with engine(path, dtype="bfloat16", **mode) as llm:
        first, ops = answer(llm, batch)
        again, _ = answer(llm, batch)
    assert_operators(ops, graph=bool(mode))
    assert cached(again)[-2:] == [128, 256]
    assert_as_close_as_bfloat16(first, path, bfloat16_table, "prolog")
    assert_as_close_as_bfloat16(again, path, bfloat16_table, "prolog cached")


def test_two_ranks(checkpoint_path: Callable[[str], Path], bfloat16_table):
    """Half of the heads on each rank, latents on both."""
    path = checkpoint_path(NAME)
    with worker_engine(path, 2, dtype="bfloat16", **GRAPHS) as llm:
        outputs = greedy(llm, prompts(VOCAB), STEPS, logprobs=1)
    assert_as_close_as_bfloat16(outputs, path, bfloat16_table, "prolog TP2")


@MODES
@pytest.mark.parametrize(
    "make",
    [quantized.write_w8a8_dynamic, lambda source: quantized.write_modelslim(source, static=False)],
    ids=["compressed-tensors", "modelslim"],
)
def test_int8(make, mode, checkpoint_path: Callable[[str], Path], bfloat16_table):
    """W8A8 with activations quantized for each token; the operator quantizes the normed query itself."""
    made = make(checkpoint_path(NAME))
    with engine(made.path, dtype="bfloat16", **mode) as llm:
        outputs, ops = answer(llm, prompts(VOCAB))
    assert_operators(ops, graph=bool(mode))
    assert_as_close_as_bfloat16(outputs, made, bfloat16_table, "prolog int8")
