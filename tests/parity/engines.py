"""vLLM engines for the parity tests: in this process, in fp32, small enough for two cores."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput

GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}
# Longer prompts do not fit in one step of 64 tokens: every engine of these tests prefills them in chunks, next
# to requests that already decode.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 48,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "seed": 0,
}


def start_method() -> str:
    """How workers start: spawned, unless a process without an NPU of its own has asked for forks."""
    return os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@contextmanager
def engine(path: Path | str, **settings: Any) -> Iterator[LLM]:
    """An engine on one NPU in this process, taken down on leaving."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        gc.freeze()  # vLLM collects garbage a dozen times per engine: spare it what was imported before
        llm = LLM(model=str(path), **{**SMALL, **settings})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextmanager
def worker_engine(path: Path | str, world_size: int, **settings: Any) -> Iterator[LLM]:
    """A tensor-parallel engine whose workers are processes (the engine core stays in this one)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start_method())
        patch.setenv("OMP_NUM_THREADS", "1")
        parallel = {"tensor_parallel_size": world_size, "distributed_executor_backend": "mp"}
        with engine(path, **{**parallel, **settings}) as llm:
            yield llm


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Run token-id prompts as one batch."""
    tokens = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    return llm.generate(tokens, params, use_tqdm=False)


def greedy(
    llm: LLM, prompts: Sequence[Sequence[int]], steps: int, logprobs: int | None = None
) -> list[RequestOutput]:
    """Greedy decoding of exactly ``steps`` tokens for each prompt, in one batch."""
    return generate(
        llm, prompts, SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, logprobs=logprobs)
    )


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """The generated tokens of each request."""
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    """How many prompt tokens of each request came from the prefix cache."""
    return [output.num_cached_tokens or 0 for output in outputs]


def logprob_error(output: RequestOutput, expected: Any) -> float:
    """Largest distance of the reported log probabilities of a request from ``expected`` [steps, vocab]."""
    steps = output.outputs[0].logprobs
    assert steps is not None and len(steps) == len(expected), "the engine did not report log probabilities"
    return max(
        abs(entry.logprob - float(expected[index, token]))
        for index, step in enumerate(steps)
        for token, entry in step.items()
    )
