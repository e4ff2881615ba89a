"""Data-parallel replicas that share their experts, against transformers.

Each replica has prompts of its own, so steps differ in size between them; at the end only the first has work and
the others take part with empty steps.
"""

from __future__ import annotations

import pytest

from .conftest import STEPS
from .engines import GRAPHS
from .replicas import REPLICAS, run_replicas


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"enable_expert_parallel": True}, {}, {"enable_expert_parallel": True, "tensor_parallel_size": 2}],
    ids=["ep2", "split", "tp2-ep4"],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_replicas_share_experts(settings, mode, checkpoint_path, references):
    given = {**settings, **(GRAPHS if mode == "graph" else {})}
    found = run_replicas(checkpoint_path("qwen3-moe"), STEPS, given)
    expected = [result.tokens for result in references("qwen3-moe")]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
    assert found[0][1] == expected[2]
