"""Sequence parallelism around the experts, which vLLM switches on wherever replicas of several ranks share experts:
each rank keeps its part of a replica's tokens between attention and experts. Two replicas of two ranks, by every way of
communication, against transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import STEPS
from .engines import GRAPHS
from .replicas import REPLICAS, run_replicas

CALLS = {
    "all-to-all": "aten::repeat_interleave.self_Tensor",
    "mc2": "npu::npu_moe_distribute_dispatch_v2",
}


def spread_layers(worker: Any) -> tuple[int, int, dict[str, int]]:
    """Layers of experts that the worker has, those of them whose tokens are spread over its replica, and calls of each
    way's operator.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from npufleet.kernels.virtual import counters

    modules = worker.model_runner.get_model().modules()
    layers = [module.moe_config for module in modules if isinstance(module, MoERunner)]
    calls, spread = counters.read().ops, [x for x in layers if x.is_sequence_parallel and x.sp_size == 2]
    return len(layers), len(spread), {way: calls.get(name, 0) for way, name in CALLS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-moe"])
@pytest.mark.parametrize("way", ["all-gather", "all-to-all", "mc2"])
def test_replicas_spread_their_tokens(name, way, checkpoint_path, references):
    settings = {
        "enable_expert_parallel": True,
        "tensor_parallel_size": 2,
        "additional_config": {"moe_communication": way},
        **GRAPHS,
    }
    found = run_replicas(checkpoint_path(name), STEPS, settings, ask=spread_layers)
    expected = [result.tokens for result in references(name)]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
        for layers, spread, calls in found[rank][2]:
            assert layers == spread > 0
            assert {way for way, count in calls.items() if count} == {way} - {"all-gather"}
    assert found[0][1] == expected[2]
