"""bfloat16 on an NPU against transformers: the error may not be larger than what bfloat16 itself costs.

Tokens may differ in bfloat16, so the tests score fixed sequences (prompt and fp32 answer) and compare the
log probability of each token with the fp32 reference. transformers in bfloat16 shows how large that error is
anyway.
"""

from __future__ import annotations

import pytest
import torch
from vllm import LLM, SamplingParams

from .engines import GRAPHS, engine, generate
from .reference import load, token_logprobs

NAMES = (
    "llama",
    "llama-3-rope",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma3",
    "mixtral",
    "qwen3-moe",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
)
QUICK = ("llama", "qwen2", "gemma3", "mixtral", "deepseek-v3")  # one of each kind; the others are slow tests
FACTOR = 1.5  # the mean error may be this many times that of transformers in bfloat16


def scores(llm: LLM, sequences: list[list[int]]) -> list[torch.Tensor]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = generate(llm, sequences, params)
    return [
        torch.tensor([step[token].logprob for step, token in zip(o.prompt_logprobs[1:], s[1:], strict=True)])
        for o, s in zip(outputs, sequences, strict=True)
    ]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_error_is_that_of_the_number_format(name, checkpoint_path, references, bfloat16_table):
    sequences = [[*result.prompt, *result.tokens] for result in references(name)]
    exact = load(checkpoint_path(name))
    rounded = load(checkpoint_path(name), dtype=torch.bfloat16)
    with engine(checkpoint_path(name), dtype="bfloat16", **GRAPHS) as llm:
        found = scores(llm, sequences)
    truth = torch.cat([token_logprobs(exact, sequence) for sequence in sequences])
    ours = (torch.cat(found) - truth).abs()
    theirs = (torch.cat([token_logprobs(rounded, sequence) for sequence in sequences]) - truth).abs()
    bfloat16_table.append(
        (name, float(ours.mean()), float(ours.max()), float(theirs.mean()), float(theirs.max()))
    )
    assert ours.mean() < FACTOR * theirs.mean()
    assert ours.max() < 2 * FACTOR * theirs.max()
