"""Tensor parallel engines (worker processes, HCCL between them) against transformers, eager and graph mode.

The sums of a row-parallel layer are taken in another order than in one process, so logits are equal within
rounding: the tolerance is stated, and the margins of the tiny checkpoint are wide enough for equal tokens.
"""

from __future__ import annotations

import pytest

from .conftest import assert_answers_twice
from .engines import GRAPHS, worker_engine


@pytest.mark.parametrize("mode", [pytest.param({}, marks=pytest.mark.slow), GRAPHS], ids=["eager", "graph"])
def test_two_ranks(mode, checkpoint_path, references):
    expected = references("llama-tp")
    with worker_engine(checkpoint_path("llama-tp"), 2, **mode) as llm:
        assert_answers_twice(llm, expected)
