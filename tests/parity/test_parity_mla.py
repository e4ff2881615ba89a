"""Multi-head latent attention against transformers' own DeepSeek classes: fp32, eager and graph mode.

The prompts are prefilled in chunks of 64 tokens next to requests that already decode, so expanded attention over
earlier tokens, merging by log-sum-exp and absorbed decode all run, in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm import LLM

from .checkpoints import LATENT_CHECKPOINTS, VOCAB
from .conftest import LOGPROB_TOLERANCE, STEPS, assert_answers_twice, in_both_modes
from .engines import GRAPHS, cached, engine, greedy, logprob_error, tokens, worker_engine
from .reference import greedy as hf_greedy
from .reference import load, prompts
from .test_parity_connector import with_storage

NAMES = [checkpoint.name for checkpoint in LATENT_CHECKPOINTS]


@pytest.fixture(scope="module", params=in_both_modes(NAMES, eager=("deepseek-v2",)))
def served(request, checkpoint_path) -> Iterator[tuple[str, str, LLM]]:
    """(checkpoint name, mode, engine)."""
    name, mode = request.param
    with engine(checkpoint_path(name), **(GRAPHS if mode == "graph" else {})) as llm:
        yield name, mode, llm


def test_mixed_batch_with_chunked_prefill(served, references):
    name, _, llm = served
    expected = references(name)
    outputs = greedy(llm, prompts(VOCAB), STEPS, logprobs=5)
    assert tokens(outputs) == [result.tokens for result in expected]
    for output, result in zip(outputs, expected, strict=True):
        assert logprob_error(output, result.logprobs) < LOGPROB_TOLERANCE


def test_prefix_cache_hit(served, references):
    """The same prompts again: the long ones attend over cached blocks and must not answer differently."""
    name, _, llm = served
    greedy(llm, prompts(VOCAB), 1)
    outputs = greedy(llm, prompts(VOCAB), STEPS)
    assert cached(outputs)[-2:] == [128, 256]
    assert tokens(outputs) == [result.tokens for result in references(name)]


def test_shared_prefix_with_another_ending(served, checkpoint_path):
    name, _, llm = served
    base = prompts(VOCAB)[-2]
    forked = [*base, *prompts(VOCAB, lengths=(20,), seed=11)[0]]
    greedy(llm, [base], 1)
    (output,) = greedy(llm, [forked], 24)
    assert cached([output]) == [128]
    assert tokens([output])[0] == hf_greedy(load(checkpoint_path(name)), forked, 24).tokens


def test_the_caches_are_latents_and_rotary_parts(served):
    """Per layer and token 512 and 64 elements, nothing more, in pages of 128 tokens; graphs where asked for."""
    _, mode, llm = served
    config = llm.llm_engine.vllm_config.compilation_config
    assert config.cudagraph_mode.has_full_cudagraphs() is (mode == "graph")
    layers = config.static_forward_context.values()
    widths = [tuple(x.kv_cache.shape[-2:]) for x in layers if hasattr(x, "kv_cache")]
    assert sorted(widths) == [(128, 64)] * 3 + [(128, 512)] * 3, "MLA layers and nothing else"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("deepseek-v2", {}, marks=pytest.mark.slow),
        ("deepseek-v3", GRAPHS),
        pytest.param("kimi-k2", GRAPHS, marks=pytest.mark.slow),  # three heads on each rank, padded to four
        pytest.param("deepseek-v3-moe", {"enable_expert_parallel": True, **GRAPHS}, marks=pytest.mark.slow),
    ],
    ids=["v2-eager", "v3-graph", "padded-heads-graph", "expert-parallel-graph"],
)
def test_two_ranks(name, mode, checkpoint_path, references):
    """Half of the heads on each rank; latents and rotary parts on both."""
    expected = references(name)
    with worker_engine(checkpoint_path(name), 2, **mode) as llm:
        assert_answers_twice(llm, expected)


@pytest.mark.parametrize("mode", [pytest.param({}, marks=pytest.mark.slow), GRAPHS], ids=["eager", "graph"])
def test_a_connector_moves_both_caches(mode, tmp_path, checkpoint_path, references):
    """What one engine stored (latents and rotary parts of each layer), another loads and continues from."""
    name, batch, settings = "deepseek-v3", prompts(VOCAB)[1:], with_storage(tmp_path, **mode)
    expected = [result.tokens[:32] for result in references(name)[1:]]
    with engine(checkpoint_path(name), **settings) as first:
        assert tokens(greedy(first, batch, 32)) == expected
    files = {path.stem for path in tmp_path.rglob("*.safetensors")}
    assert len(files) == 6 and sum(x.endswith(".rope") for x in files) == 3
    with engine(checkpoint_path(name), **settings) as second:
        outputs = greedy(second, batch, 32)
    assert cached(outputs)[-2:] == [128, 256], "the long prompts were expected to be loaded, not computed"
    assert tokens(outputs) == expected


@pytest.mark.slow
def test_two_stages(checkpoint_path, references):
    """Pipeline parallel: each stage has the caches of its own layers."""
    with worker_engine(checkpoint_path("deepseek-v2"), 1, pipeline_parallel_size=2) as llm:
        outputs = greedy(llm, prompts(VOCAB), STEPS)
    assert tokens(outputs) == [result.tokens for result in references("deepseek-v2")]


def test_large_blocks_and_too_few_of_them(checkpoint_path):
    """Blocks of 256 tokens are two pages; requests that are dropped and computed again answer the same."""
    batch = prompts(VOCAB, lengths=(100, 150, 200, 250))
    model = load(checkpoint_path("deepseek-v2"))
    with engine(
        checkpoint_path("deepseek-v2"), block_size=256, num_gpu_blocks_override=6, max_model_len=384, **GRAPHS
    ) as llm:
        outputs = greedy(llm, batch, STEPS)
    assert tokens(outputs) == [hf_greedy(model, prompt, STEPS).tokens for prompt in batch]


def test_plain_attention_in_its_stead(checkpoint_path, references, monkeypatch):
    """What errors about unsupported sizes advise: the same model with expanded keys and values in the cache."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with engine(checkpoint_path("deepseek-v2")) as llm:
        assert not llm.llm_engine.vllm_config.model_config.use_mla
        outputs = greedy(llm, prompts(VOCAB), STEPS)
    assert tokens(outputs) == [result.tokens for result in references("deepseek-v2")]


def test_earlier_tokens_in_many_chunks(checkpoint_path, references):
    """One page at a time: each long prompt attends over its earlier tokens in several parts that are merged."""
    with engine(checkpoint_path("deepseek-v2")) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        groups = [group for groups in worker.model_runner.attn_groups for group in groups]
        builders = [x for group in groups for x in group.metadata_builders if hasattr(x, "_limit")]
        assert len(builders) == 1
        builders[0]._limit = 128
        outputs = greedy(llm, prompts(VOCAB), STEPS)
        again = greedy(llm, prompts(VOCAB), STEPS)
    expected = [result.tokens for result in references("deepseek-v2")]
    assert tokens(outputs) == expected
    assert cached(again)[-1] == 256 and tokens(again) == expected
