"""Values of vLLM's engine arguments are refused before anything starts, and exactly those that vLLM refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from npufleet.cluster.engine import args, values

WRONG: list[tuple[str, Any, str]] = [
    ("max_model_len", "32k", "expected int, got '32k'"),
    ("max_model_len", 1.5, "expected int, got 1.5"),
    ("max_model_len", -5, "expected at least -1, got -5"),
    ("max_num_seqs", 0, "expected at least 1, got 0"),
    ("max_num_seqs", True, "expected int, got True"),
    ("max_num_batched_tokens", -1, "expected at least 1"),
    ("gpu_memory_utilization", math.nan, "expected above 0 and at most 1, got nan"),
    ("gpu_memory_utilization", 95, "expected above 0 and at most 1, got 95"),
    ("gpu_memory_utilization", "0.9", "expected float, int, got '0.9'"),
    ("dtype", "fp16", "expected one of auto, bfloat16, float, float16, float32, half, got 'fp16'"),
    ("dtype", 5, "expected one of auto"),
    ("kv_cache_dtype", "int3", "expected one of auto"),
    ("all2all_backend", "nccl", "expected one of allgather_reducescatter"),
    ("enforce_eager", "yes", "expected bool, got 'yes'"),
    ("block_size", 0, "expected above 0, got 0"),
    ("tool_call_parser", 5, "expected str, got 5"),
    ("kv_cache_memory_bytes", -1, "expected an integer from 1"),
    ("num_gpu_blocks_override", "many", "expected int, got 'many'"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_wrong_values_are_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        args.check({name: value}, "engine")
    assert str(error.value).startswith(f"engine.{name}: ") and said in str(error.value)


def test_what_only_vllm_can_judge_is_left_to_it() -> None:
    given: dict[str, Any] = {
        "hf_overrides": {"a": 1}, "compilation_config": {"mode": 0}, "quantization": "whatever", "load_format": "x",
        "max_model_len": None, "gpu_memory_utilization": 1, "tokenizer_mode": "my_own", "hf_token": True,
    }  # fmt: skip
    assert args.check(given, "engine") == given


def test_the_defaults_of_the_installed_vllm_are_all_allowed() -> None:
    from dataclasses import MISSING, fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    checked = 0
    for field in fields(AsyncEngineArgs):
        allowed = values.of(field.name)
        if allowed is None or field.default is MISSING or field.default is None:
            continue
        allowed.check(field.default, field.name)
        checked += 1
    assert checked > 100, "most arguments are plain types"


def test_a_typo_lists_the_near_ones_only() -> None:
    with pytest.raises(ValueError, match=r"^engine: unknown key 'zzzzzzzz'$"):
        args.check({"zzzzzzzz": 1}, "engine")
