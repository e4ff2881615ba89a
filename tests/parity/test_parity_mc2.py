"""Experts that tokens reach through fused dispatch and combine (MC2), against transformers.

Two ranks of A2 take that way where it is asked for; steps too large for it go by all-gather, so every engine here uses
both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.outputs import RequestOutput

from . import quantized
from .checkpoints import VOCAB
from .conftest import STEPS, assert_answers_twice
from .engines import GRAPHS, greedy, tokens, worker_engine
from .quantized import quantized_activations
from .reference import load, prompts, token_logprobs
from .replicas import REPLICAS, run_replicas
from .test_parity_moe import calls_on_a_rank

MC2 = {"enable_expert_parallel": True, "additional_config": {"moe_communication": "mc2"}}
DISPATCH = "npu::npu_moe_distribute_dispatch_v2"
FACTOR = 1.5  # the mean error may be this many times that of transformers in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen3-moe", GRAPHS),
        ("deepseek-v3-moe", GRAPHS),
        ("glm4-moe", GRAPHS),
        ("mixtral", {}),
    ],
    ids=["qwen3-graph", "deepseek-v3-graph", "glm4-graph", "mixtral-eager"],
)
def test_two_ranks(name, mode, checkpoint_path, references):
    with worker_engine(checkpoint_path(name), 2, **MC2, **mode) as llm:
        assert_answers_twice(llm, references(name))
        dispatches = llm.collective_rpc(calls_on_a_rank, args=(DISPATCH,))
    assert min(dispatches) > 0 and len(set(dispatches)) == 1, dispatches


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2], ids=["ep2", "tp2-ep4"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_replicas(tensor, mode, checkpoint_path, references):
    """Steps differ in size between the replicas, and at the end one has empty steps alone."""
    given = {**MC2, "tensor_parallel_size": tensor, **(GRAPHS if mode == "graph" else {})}
    found = run_replicas(checkpoint_path("qwen3-moe"), STEPS, given)
    expected = [result.tokens for result in references("qwen3-moe")]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
    assert found[0][1] == expected[2]


def chosen(outputs: list[RequestOutput]) -> torch.Tensor:
    """Log probabilities of the tokens of all answers, as the decode steps gave them."""
    steps = [zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True) for o in outputs]
    return torch.tensor([entry[token].logprob for request in steps for entry, token in request])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
def test_rows_that_travel_as_int8(mode, checkpoint_path: Callable[[str], Path], bfloat16_table: Any):
    """Experts with int8 weights: the error of decoded tokens is that of the number format."""
    made = quantized.write_w8a8_dynamic(checkpoint_path("qwen3-moe"))
    with worker_engine(made.path, 2, dtype="bfloat16", **MC2, **mode) as llm:
        outputs = greedy(llm, prompts(VOCAB), 48, logprobs=0)
        assert min(llm.collective_rpc(calls_on_a_rank, args=(DISPATCH,))) > 0
    ours, answers = chosen(outputs), tokens(outputs)

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        model = load(made.twin, dtype=dtype)
        with quantized_activations(model, made.inputs):
            return torch.cat(
                [
                    token_logprobs(model, [*prompt, *answer])[len(prompt) - 1 :]
                    for prompt, answer in zip(prompts(VOCAB), answers, strict=True)
                ]
            )

    truth = theirs(torch.float32)
    error, format_error = (ours - truth).abs(), (theirs(torch.bfloat16) - truth).abs()
    bfloat16_table.append(
        ("w8a8-mc2", *(float(x) for e in (error, format_error) for x in (e.mean(), e.max())))
    )
    assert error.mean() < FACTOR * format_error.mean()
    assert error.max() < 2 * FACTOR * format_error.max()
