"""Layouts of decode context parallel that cannot work, refused before any process starts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

HERE = "decode_context_parallel_size"


def check_context_parallel(config: "VllmConfig") -> None:
    """:raises ValueError: prefill context parallel, or decode context parallel with what it does not go with."""
    from vllm import envs

    parallel, model = config.parallel_config, config.model_config
    if parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "prefill context parallel needs vLLM's second model runner, which is not supported on NPU: leave "
            "prefill_context_parallel_size at 1; decode_context_parallel_size spreads the KV cache of a sequence "
            "over the tensor-parallel ranks, and max_num_batched_tokens cuts long prompts into chunks"
        )
    if parallel.decode_context_parallel_size == 1:
        return
    if parallel.dcp_q_replicate or (envs.is_set("VLLM_DCP_Q_REPLICATE") and envs.VLLM_DCP_Q_REPLICATE):
        raise ValueError(
            f"dcp_q_replicate is not supported on NPU: leave it out, queries are gathered over {HERE}"
        )
    if config.kv_transfer_config is not None:
        raise ValueError(
            f"a KV connector together with {HERE} {parallel.decode_context_parallel_size} is not supported on NPU "
            f"yet: remove kv_transfer_config, or leave {HERE} at 1"
        )
    _check_interleave(parallel)
    if model is not None:
        _check_windows(model)
        if not model.use_mla:
            _check_key_heads(model, parallel)


def _check_interleave(parallel: "ParallelConfig") -> None:
    """A block that the operators read holds whole runs of a rank's tokens: every size is a multiple of 128."""
    from npufleet.kernels.ops.mla import PAGE_TOKENS

    if parallel.dcp_kv_cache_interleave_size > 1:
        raise ValueError(
            "dcp_kv_cache_interleave_size is an old name that has no effect: use cp_kv_cache_interleave_size"
        )
    if PAGE_TOKENS % parallel.cp_kv_cache_interleave_size:
        raise ValueError(
            f"cp_kv_cache_interleave_size {parallel.cp_kv_cache_interleave_size} does not divide blocks of "
            f"{PAGE_TOKENS} tokens: choose 1, 2, 4 … {PAGE_TOKENS}"
        )


def _check_windows(model: "ModelConfig") -> None:
    """A rank does not have the last tokens of a sequence, so it cannot tell which are inside a window."""
    text: Any = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = model.get_sliding_window()
    if window is None and not kinds:
        return
    found = (
        f"a sliding window of {window} tokens"
        if window is not None
        else f"layers of {', '.join(sorted(kinds))}"
    )
    instead = "" if kinds else ", or set disable_sliding_window if the model may run without"
    raise ValueError(f"{found} cannot be spread over ranks: leave {HERE} at 1{instead}")


def _check_key_heads(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """All ranks of a context group have the same key heads, of which vLLM checks the number and not the place."""
    ranks, tensor = parallel.decode_context_parallel_size, parallel.tensor_parallel_size
    heads = model.get_total_num_kv_heads()
    if tensor > heads and tensor // heads % ranks:
        raise ValueError(
            f"{HERE} {ranks} does not divide the {tensor // heads} ranks that share a key head (tensor_parallel_size "
            f"{tensor}, {heads} key heads): choose one that does"
        )
