"""Tensor parallel engines (worker processes, HCCL between them) against transformers, eager and graph mode.

The sums of a row-parallel layer are taken in another order than in one process, so logits are equal within
rounding: the tolerance is stated, and the margins of the tiny checkpoint are wide enough for equal tokens.
"""

from __future__ import annotations

import pytest

from .checkpoints import VOCAB
from .conftest import STEPS
from .engines import GRAPHS, cached, greedy, logprob_error, tokens, worker_engine
from .reference import prompts

LOGPROB_TOLERANCE = 2e-3  # fp32; logits have a deviation near 8


@pytest.mark.parametrize("mode", [pytest.param({}, marks=pytest.mark.slow), GRAPHS], ids=["eager", "graph"])
def test_two_ranks(mode, checkpoint_path, references):
    expected = references("llama-tp")
    with worker_engine(checkpoint_path("llama-tp"), 2, **mode) as llm:
        first = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
        again = greedy(llm, prompts(VOCAB), STEPS)
    assert tokens(first) == [result.tokens for result in expected]
    for output, result in zip(first, expected, strict=True):
        assert logprob_error(output, result.logprobs) < LOGPROB_TOLERANCE
    assert cached(again)[-2:] == [128, 256]
    assert tokens(again) == tokens(first)
