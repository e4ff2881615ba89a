"""Configurations: what is turned off, and what is refused by name with what to use instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.compilation import CompilationMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from npufleet.plugin import support

Checkpoint = Callable[..., Path]
SPREAD = {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def configure(model: Path, **arguments: Any) -> VllmConfig:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 256, "dtype": "bfloat16"}
    return EngineArgs(model=str(model), **(defaults | arguments)).create_engine_config()


def test_defaults(checkpoint: Checkpoint) -> None:
    config = configure(checkpoint("llama"))
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert "all" in config.compilation_config.custom_ops
    assert config.parallel_config.worker_cls == "npufleet.plugin.worker.NPUWorker"
    assert config.scheduler_config.async_scheduling
    assert not config.use_v2_model_runner
    assert config.device_config.device_type == "npu"


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("PIECEWISE", CUDAGraphMode.NONE),
        ("FULL_AND_PIECEWISE", CUDAGraphMode.FULL_DECODE_ONLY),
        ("FULL", CUDAGraphMode.FULL_DECODE_ONLY),
        ("FULL_DECODE_ONLY", CUDAGraphMode.FULL_DECODE_ONLY),
        ("NONE", CUDAGraphMode.NONE),
    ],
)
def test_graph_modes(checkpoint: Checkpoint, asked: str, given: CUDAGraphMode) -> None:
    config = configure(checkpoint("llama"), compilation_config={"cudagraph_mode": asked})
    assert config.compilation_config.cudagraph_mode == given


def test_the_compiler_is_turned_off(checkpoint: Checkpoint) -> None:
    config = configure(checkpoint("llama"), compilation_config={"mode": CompilationMode.VLLM_COMPILE})
    assert config.compilation_config.mode == CompilationMode.NONE


def test_passes_of_the_compiler(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named where they are asked for; what vLLM no longer has, it refuses by name: sequence parallelism is one."""
    lines: list[str] = []
    assert support.logger.name.startswith("vllm."), "vLLM shows no other logger's lines"
    monkeypatch.setattr(support.logger, "info_once", lambda text, *args: lines.append(text % args))
    configure(checkpoint("llama"))
    assert not any("Passes" in line for line in lines)
    configure(checkpoint("llama"), compilation_config={"pass_config": {"fuse_norm_quant": True}})
    assert "Passes of torch.compile are not used on NPU: fuse_norm_quant." in lines
    with pytest.raises(ValueError, match=r"enable_sp\n.*[Uu]nexpected"):
        configure(checkpoint("llama"), compilation_config={"pass_config": {"enable_sp": True}})


def test_eager(checkpoint: Checkpoint) -> None:
    config = configure(checkpoint("llama"), enforce_eager=True)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE


def test_a_configuration_is_checked_twice_without_change(checkpoint: Checkpoint) -> None:
    config = configure(checkpoint("llama"))
    before = repr(config)
    current_platform.apply_config_platform_defaults(config)
    current_platform.check_and_update_config(config)
    assert repr(config) == before


def test_a_worker_of_the_users_own_stays(checkpoint: Checkpoint) -> None:
    config = configure(checkpoint("llama"), worker_cls="somewhere.Worker")
    assert config.parallel_config.worker_cls == "somewhere.Worker"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("llama", {"kv_cache_dtype": "fp8"}, r"kv_cache_dtype 'fp8'.*bfloat16"),
        ("llama", {"quantization": "fp8"}, "quantization 'fp8' of a checkpoint while it is loaded"),
        ("llama", {"quantization": "awq"}, r"quantization 'awq'.*'compressed-tensors'"),
        ("llama", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        (
            "llama",
            {"prefill_context_parallel_size": 2},
            r"prefill context parallel.*second model runner.*decode_context_parallel_size",
        ),
        (
            "llama",
            {**SPREAD, "dcp_q_replicate": True},
            "dcp_q_replicate is not supported on NPU: leave it out",
        ),
        ("llama", {**SPREAD, "kv_transfer_config": CONNECTOR}, r"KV connector.*remove kv_transfer_config"),
        ("llama", {**SPREAD, "dcp_kv_cache_interleave_size": 2}, "use cp_kv_cache_interleave_size"),
        ("llama", {**SPREAD, "cp_kv_cache_interleave_size": 3}, "3 does not divide blocks of 128 tokens"),
        (
            "llama",
            {
                "tensor_parallel_size": 24,
                "decode_context_parallel_size": 4,
                "hf_overrides": {"num_attention_heads": 48, "head_dim": 16},
            },
            "decode_context_parallel_size 4 does not divide the 6 ranks that share a key head",
        ),
        ("mistral", SPREAD, r"sliding window of 32 tokens.*disable_sliding_window"),
        (
            "mla",
            {"hf_overrides": {"num_attention_heads": 256}, **SPREAD, "tensor_parallel_size": 2},
            r"256 query heads.*decode_context_parallel_size",
        ),
        (
            "llama",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding",
        ),
        ("llama", {"enable_lora": True}, r"LoRA.*merged"),
        ("llama", {"enable_sleep_mode": True}, r"[Ss]leep mode"),
        (
            "mla",
            {"hf_overrides": {"kv_lora_rank": 256}},
            r"kv_lora_rank 256.*kv_lora_rank 512.*VLLM_MLA_DISABLE",
        ),
        ("mla", {"dtype": "float16"}, r"float16.*bfloat16.*VLLM_MLA_DISABLE"),
        ("mla", {"hf_overrides": {"num_attention_heads": 256}}, r"256 query heads.*tensor_parallel_size"),
        ("mamba", {}, r"state-space.*dense"),
    ],
)
def test_refusals(checkpoint: Checkpoint, kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(checkpoint(kind), **arguments)


def test_the_second_model_runner_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"second model runner.*VLLM_USE_V2_MODEL_RUNNER"):
        configure(checkpoint("llama"))


def test_batch_invariance_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="batch invariance"):
        configure(checkpoint("llama"))


def test_dtypes() -> None:
    for dtype in current_platform.supported_dtypes:
        current_platform.check_if_supports_dtype(dtype)
    with pytest.raises(ValueError, match=r"float64.*bfloat16"):
        current_platform.check_if_supports_dtype(torch.float64)
