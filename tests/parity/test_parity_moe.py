"""Experts over two ranks against transformers: split by tensor parallelism, or spread by expert parallelism.

One rank, eager and in graph mode, is in the tests that every checkpoint passes.
"""

from __future__ import annotations

from typing import Any

import pytest

from .checkpoints import VOCAB
from .conftest import STEPS, assert_answers_twice
from .engines import GRAPHS, greedy, tokens, worker_engine
from .reference import prompts

SPREAD = {"enable_expert_parallel": True}


def calls_on_a_rank(worker: Any, name: str) -> int:
    """Calls of an operator that the worker's process made; runs there."""
    from npufleet.kernels.virtual import counters

    return counters.read().ops.get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", GRAPHS),
        ("qwen3-moe", {**GRAPHS, **SPREAD}),
        ("glm4-moe", {**GRAPHS, **SPREAD}),
        ("glm4-moe", {}),
        ("mixtral", SPREAD),
        ("deepseek-v2-moe", {**GRAPHS, **SPREAD}),
        ("deepseek-v3-moe", {**GRAPHS, **SPREAD}),
        ("qwen3-moe", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    ],
    ids=[
        "mixtral-tp-graph",
        "qwen3-ep-graph",
        "glm4-ep-graph",
        "glm4-tp-eager",
        "mixtral-ep-eager",
        "deepseek-v2-ep-graph",
        "deepseek-v3-ep-graph",
        "qwen3-pp-eager",
    ],
)
def test_two_ranks(name, settings, checkpoint_path, references):
    expected = references(name)
    with worker_engine(checkpoint_path(name), 2, **settings) as llm:
        assert_answers_twice(llm, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, GRAPHS], ids=["eager", "graph"])
def test_large_steps_go_all_to_all(mode, checkpoint_path, references, monkeypatch):
    """One expert of a token is fewer than two ranks, and a prefill of 64 tokens is larger than any decode step."""
    monkeypatch.setenv("NPUFLEET_DEVICE", "virtual:2:Ascend910_9392,hbm=16GiB")  # read by the workers
    with worker_engine(checkpoint_path("mixtral-top-1"), 2, **SPREAD, **mode) as llm:
        outputs = greedy(llm, prompts(VOCAB), STEPS)
        exchanges = llm.collective_rpc(calls_on_a_rank, args=("aten::repeat_interleave.self_Tensor",))
    assert tokens(outputs) == [result.tokens for result in references("mixtral-top-1")]
    assert min(exchanges) > 0, "no step went all-to-all"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all-to-all", "mc2"])
def test_four_ranks_by_a_way_that_was_asked_for(way, checkpoint_path, references):
    """Prefills go all-to-all, or what fits of all steps goes by fused dispatch and combine."""
    asked = {"additional_config": {"moe_communication": way}}
    with worker_engine(checkpoint_path("qwen3-moe"), 4, **SPREAD, **GRAPHS, **asked) as llm:
        outputs = greedy(llm, prompts(VOCAB), STEPS)
        name = {
            "all-to-all": "aten::repeat_interleave.self_Tensor",
            "mc2": "npu::npu_moe_distribute_dispatch_v2",
        }[way]
        calls = llm.collective_rpc(calls_on_a_rank, args=(name,))
    assert tokens(outputs) == [result.tokens for result in references("qwen3-moe")]
    assert min(calls) > 0, f"no step went by {way}"
