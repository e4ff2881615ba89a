"""Shared experts wherever a user can put them, against transformers: tokens and log probabilities in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .checkpoints import BY_NAME, VOCAB, write
from .conftest import STEPS, assert_answers_twice
from .engines import GRAPHS, greedy, tokens, worker_engine
from .reference import greedy as reference_greedy
from .reference import load, prompts
from .replicas import REPLICAS, run_replicas
from .test_parity_moe import calls_on_a_rank

A3 = "virtual:4:Ascend910_9391,hbm=16GiB"
DISPATCH = "npu::npu_moe_distribute_dispatch_v2"
WIDE = 1024
"""The smallest hidden size that dispatch and combine take on A3."""
SEEDS = {"deepseek-v3-moe": 2, "glm4-moe": 0}
"""Of weights whose greedy steps are clearly apart."""


def asked(**options: Any) -> dict[str, Any]:
    return {"additional_config": options}


SPREAD = {"enable_expert_parallel": True}
WHOLE, SPLIT = {"shared_experts": "replicated"}, {"shared_experts": "tensor-parallel"}
BESIDE = {"shared_experts_overlap": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek-v3-moe", {**GRAPHS, **asked(**WHOLE)}),
        ("deepseek-v3-moe", {**GRAPHS, **SPREAD, **asked(**WHOLE, **BESIDE, moe_communication="mc2")}),
        ("glm4-moe", {**SPREAD, **asked(**WHOLE, moe_communication="all-to-all")}),
        ("glm4-moe", {**GRAPHS, **SPREAD, **asked(**SPLIT, **BESIDE)}),
    ],
    ids=["whole-sliced-experts", "whole-beside-mc2", "whole-all-to-all", "split-beside"],
)
def test_two_ranks(name, settings, checkpoint_path, references):
    with worker_engine(checkpoint_path(name), 2, **settings) as llm:
        assert_answers_twice(llm, references(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek-v3-moe", {**GRAPHS, **asked(**SPLIT, **BESIDE)}),
        ("glm4-moe", {**GRAPHS, **asked(**WHOLE)}),
        ("glm4-moe", asked(**WHOLE, **BESIDE, moe_communication="mc2")),
    ],
    ids=["spread-tokens-split", "shared-tokens-whole", "shared-tokens-whole-mc2"],
)
def test_replicas_of_two_ranks(name, settings, checkpoint_path, references):
    """Tokens are spread over the ranks of a replica (DeepSeek's model), or shared by them (GLM's)."""
    found = run_replicas(checkpoint_path(name), STEPS, {**SPREAD, **settings, "tensor_parallel_size": 2})
    expected = [result.tokens for result in references(name)]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
    assert found[0][1] == expected[2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[tuple[int, ...]]]]:
    """Name of a checkpoint → one of ``WIDE`` hidden elements, and what transformers answers."""
    folder = tmp_path_factory.mktemp("wide")

    @cache
    def make(name: str) -> tuple[Path, list[tuple[int, ...]]]:
        plain = BY_NAME[name]
        wide_config = {**plain.config, "hidden_size": WIDE}
        changed = replace(plain, name=f"{name}-wide", config=wide_config, seed=SEEDS[name])
        path = write(changed, folder)
        model = load(path)
        answers = [reference_greedy(model, prompt, STEPS) for prompt in prompts(VOCAB)]
        assert min(answer.margin for answer in answers) > 1e-3
        return path, [answer.tokens for answer in answers]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mc2", "all-gather"])
def test_ranks_of_their_own(way, wide, monkeypatch):
    """Two of four ranks have the shared experts, the others the routed ones."""
    monkeypatch.setenv("NPUFLEET_DEVICE", A3)  # read by the workers
    path, expected = wide("deepseek-v3-moe")
    options = asked(shared_expert_ranks=2, moe_communication=way)
    with worker_engine(path, 4, **SPREAD, **GRAPHS, **options) as llm:
        outputs = greedy(llm, prompts(VOCAB), STEPS)
        dispatches = llm.collective_rpc(calls_on_a_rank, args=(DISPATCH,))
        held = llm.collective_rpc(held_weights)
    assert tokens(outputs) == expected
    assert min(dispatches) > 0 if way == "mc2" else max(dispatches) == 0
    assert [shared > 0 for shared, _ in held] == [True, True, False, False]
    assert [routed > 0 for _, routed in held] == [False, False, True, True]


def held_weights(worker: Any) -> tuple[int, int]:
    """Elements of shared and of routed experts that the worker holds; runs there."""
    named = list(worker.model_runner.get_model().named_parameters())
    shared = sum(x.numel() for name, x in named if "shared_experts." in name)
    routed = sum(x.numel() for name, x in named if "experts.routed_experts." in name or ".w13_" in name)
    return shared, routed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3-moe", "glm4-moe"])
def test_ranks_of_their_own_between_replicas(name, wide, monkeypatch):
    monkeypatch.setenv("NPUFLEET_DEVICE", A3)
    path, expected = wide(name)
    options = asked(shared_expert_ranks=2, moe_communication="mc2")
    found = run_replicas(path, STEPS, {**SPREAD, **GRAPHS, **options, "tensor_parallel_size": 2})
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
    assert found[0][1] == expected[2]
