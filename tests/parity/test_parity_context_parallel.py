"""Decode context parallel against transformers: the tokens of a sequence lie on several ranks, fp32, greedy.

Prompts of 1 to 300 tokens are prefilled in chunks of 64 next to requests that decode, so a rank has none, some or
many tokens of a request; the second round reads them from the prefix cache.
"""

from __future__ import annotations

import pytest

from .checkpoints import VOCAB
from .conftest import STEPS, assert_answers_twice
from .engines import GRAPHS, greedy, tokens, worker_engine
from .reference import greedy as hf_greedy
from .reference import load, prompts

BLOCK = 256
"""Tokens of a sequence in a block of two ranks."""
SPREAD = {"decode_context_parallel_size": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek-v3", GRAPHS),
        pytest.param("deepseek-v3", {"cp_kv_cache_interleave_size": 32, **GRAPHS}, marks=slow),
        pytest.param("deepseek-v3-moe", {"enable_expert_parallel": True, **GRAPHS}, marks=slow),
        pytest.param("deepseek-v2", {}, marks=slow),
        pytest.param("deepseek-v2", {"dcp_comm_backend": "a2a", **GRAPHS}, marks=slow),
        pytest.param("kimi-k2", GRAPHS, marks=slow),  # six heads of two ranks, padded to eight
        pytest.param("gemma", {}, marks=slow),
        pytest.param("gemma", GRAPHS, marks=slow),
        pytest.param(
            "gemma", {"dcp_comm_backend": "a2a", "cp_kv_cache_interleave_size": 128, **GRAPHS}, marks=slow
        ),
    ],
    ids=[
        "v3-graph",
        "v3-runs-of-32",
        "v3-moe-expert-parallel",
        "v2-eager",
        "v2-all-to-all",
        "padded-heads",
        "one-key-head-eager",
        "one-key-head-graph",
        "one-key-head-all-to-all",
    ],
)
def test_two_ranks(name, settings, checkpoint_path, references):
    """Latents of two ranks, or the one key head that both have."""
    expected = references(name)
    with worker_engine(checkpoint_path(name), 2, **SPREAD, **settings) as llm:
        assert_answers_twice(llm, expected, BLOCK)


@slow
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3"])
def test_two_groups_of_two_ranks(name, checkpoint_path, references):
    """Four tensor-parallel ranks: latents lie on two and once more on the others, a key head on two."""
    expected = references(name)
    with worker_engine(checkpoint_path(name), 4, **SPREAD, **GRAPHS) as llm:
        assert_answers_twice(llm, expected, BLOCK)


@slow
@pytest.mark.parametrize("name", ["deepseek-v2", "gemma"])
def test_few_blocks(name, checkpoint_path):
    """Half the blocks that one rank would need for these requests; some are dropped and computed again."""
    batch = prompts(VOCAB, lengths=(100, 150, 200, 250))
    model = load(checkpoint_path(name))
    settings = {"num_gpu_blocks_override": 6, "max_model_len": 384, **SPREAD, **GRAPHS}
    with worker_engine(checkpoint_path(name), 2, **settings) as llm:
        outputs = greedy(llm, batch, STEPS)
    assert tokens(outputs) == [hf_greedy(model, prompt, STEPS).tokens for prompt in batch]
