"""Where vLLM places the pages must not show in the tokens: split blocks, pages of all layers side by side."""

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.slow


def generate(model: Path, **arguments: Any) -> tuple[list[list[int]], set[int]]:
    """Greedy tokens of three requests, and the distance of two pages in half pages as the metadata has it."""
    llm = LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.01,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        **arguments,
    )
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 128) for _ in range(n)]} for n in (3, 130, 600)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    tokens = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    core = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    steps = {g.get_metadata_builder()._bound_cache().step for groups in runner.attn_groups for g in groups}
    core.shutdown()
    return tokens, steps


def test_tokens_do_not_depend_on_the_placement(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = checkpoint("llama", weights=True)
    # Each in a process of its own: vLLM does not start where what others have left is freed while it measures memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as apart:
        plain, steps = apart.submit(generate, model).result()
        assert steps == {2}
        split, steps = apart.submit(generate, model, block_size=1024).result()  # two parts of 512 tokens each
        assert steps == {2} and split == plain
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
        side_by_side, steps = apart.submit(generate, model).result()
        assert steps == {4} and side_by_side == plain
