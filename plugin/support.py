"""What NPUs support: defaults, refusals by name, the choice of the attention backend."""

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

WORKER = "npufleet.plugin.worker.NPUWorker"
ALWAYS = "eliminate_noops"
"""The one pass of vLLM's compiler that is on without being asked for."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16")


def apply_defaults(config: "VllmConfig") -> None:
    """Before vLLM fills in its own defaults: no compiler, graphs for decode steps, our layers everywhere."""
    from vllm.config import CUDAGraphMode
    from vllm.config.compilation import CompilationMode

    from .quantization.modelslim import recognise

    recognise(config)
    compilation = config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        logger.info_once(
            "torch.compile is not used on NPU: compilation mode %s is turned off.", compilation.mode
        )
    compilation.mode = CompilationMode.NONE
    passes = [name for name, on in vars(compilation.pass_config).items() if on is True and name != ALWAYS]
    if passes:
        logger.info_once("Passes of torch.compile are not used on NPU: %s.", ", ".join(passes))
    if not {"all", "none"} & set(compilation.custom_ops):
        compilation.custom_ops.append("all")
    graphs = compilation.cudagraph_mode
    if graphs in (None, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        wanted = CUDAGraphMode.FULL_DECODE_ONLY if graphs is None else graphs
    else:
        wanted = (
            CUDAGraphMode.FULL_DECODE_ONLY
            if graphs.decode_mode() == CUDAGraphMode.FULL
            else CUDAGraphMode.NONE
        )
        logger.info_once(
            "Graph mode %s is not available on NPU, where only whole decode steps are captured; using %s.",
            graphs.name,
            wanted.name,
        )
    compilation.cudagraph_mode = wanted


def check_config(config: "VllmConfig") -> None:
    """After vLLM's defaults: refuse what is not supported, then choose the worker and its start method.

    :raises ValueError: an unsupported feature, with what to use in its stead.
    """
    from .moe.support import check_experts
    from .quantization import check_configuration

    checks = (_check_runner, _check_parallel, _check_cache, _check_model, check_experts, _check_features)
    for check in (*checks, check_configuration):
        check(config)
    _settle_graphs(config)
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKER
    # A forked process cannot use the NPU context of its parent.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _check_runner(config: "VllmConfig") -> None:
    if config.use_v2_model_runner:
        raise ValueError(
            "vLLM's second model runner is not supported on NPU: unset VLLM_USE_V2_MODEL_RUNNER, HiSparse "
            "and watermarking, which ask for it"
        )


def _check_parallel(config: "VllmConfig") -> None:
    from .attention.context_support import check_context_parallel

    parallel = config.parallel_config
    check_context_parallel(config)
    if parallel.enable_dbo or parallel.use_ubatching:
        raise ValueError("dual-batch overlap is not supported on NPU yet: leave enable_dbo off")


def _check_cache(config: "VllmConfig") -> None:
    cache = config.cache_config
    if cache.cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype {cache.cache_dtype!r} is not supported on NPU yet; use one of "
            + ", ".join(KV_CACHE_DTYPES)
        )
    if cache.kv_sharing_fast_prefill:
        raise ValueError("kv_sharing_fast_prefill is not supported on NPU yet: leave it off")


def _check_model(config: "VllmConfig") -> None:
    model = config.model_config
    if model is None:
        return
    supported = "supported are decoder-only models, dense or with experts, and encoder-only models"
    if model.use_mla:
        from .attention.mla import SIZES, check_model

        sizes = {name: getattr(model.hf_text_config, name, None) for name in SIZES}
        ranks = config.parallel_config.decode_context_parallel_size
        check_model(sizes, model.get_num_attention_heads(config.parallel_config) * ranks, model.dtype)
    if model.is_hybrid or model.is_attention_free:
        raise ValueError(f"state-space (Mamba-like) layers are not supported on NPU yet; {supported}")
    if model.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported on NPU yet; {supported}")


def _check_features(config: "VllmConfig") -> None:
    from vllm import envs

    if config.speculative_config is not None:
        raise ValueError("speculative decoding is not supported on NPU yet: remove speculative_config")
    if config.lora_config is not None:
        raise ValueError(
            "LoRA adapters are not supported on NPU yet: leave enable_lora off and serve a checkpoint with "
            "the adapter merged"
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError("batch invariance is not supported on NPU yet: unset VLLM_BATCH_INVARIANT")


def _settle_graphs(config: "VllmConfig") -> None:
    """Drop what vLLM may have put back since :func:`apply_defaults` (pooling models, some connectors)."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    if compilation.cudagraph_mode not in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        logger.info_once(
            "Graph mode %s is not available on NPU; running without graphs.", compilation.cudagraph_mode.name
        )
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        compilation.max_cudagraph_capture_size = 0


def choose_backend(selected: "AttentionBackendEnum | None", wanted: "AttentionSelectorConfig") -> str:
    """The import path of the attention backend for a layer.

    :param selected: the user's choice, None if there is none.
    :raises ValueError: sparse attention, another platform's backend, or a layer that the backend of its kind
        does not take; with the reasons.
    """
    from .attention import BACKENDS, LAYER_BACKENDS

    if wanted.use_sparse:
        raise ValueError(
            "sparse attention is not supported on NPU yet; supported are " + ", ".join(LAYER_BACKENDS)
        )
    if selected is not None and selected.name not in LAYER_BACKENDS:
        raise ValueError(
            f"attention backend {selected.name} is not for NPU; leave it out or use one of "
            + ", ".join(LAYER_BACKENDS)
        )
    fields = wanted._asdict()
    if wanted.use_mla:
        from .attention.mla import AscendMLABackend

        reasons = AscendMLABackend.validate_configuration(device_capability=None, **fields)  # type: ignore[arg-type]
        if reasons:
            raise ValueError(
                f"latent attention on NPU does not take this layer: {'; '.join(reasons)}. It takes latents of "
                "512 elements with rotary parts of 64, blocks of a multiple of 128 tokens, bfloat16 or float32"
            )
        return BACKENDS["NPU_MLA"]
    from .attention.dense import AscendAttentionBackend

    # vLLM's float32 models keep a float32 cache, which the default list of cache dtypes does not name.
    reasons = AscendAttentionBackend.validate_configuration(device_capability=None, **fields)  # type: ignore[arg-type]
    if reasons:
        from .attention.layout import BLOCK_SIZES

        raise ValueError(
            f"dense attention on NPU does not take this layer: {'; '.join(reasons)}. It takes heads of a "
            f"multiple of 16 up to 512 elements, blocks of a multiple of {BLOCK_SIZES[0]} tokens, bfloat16, "
            "float16 or float32"
        )
    return BACKENDS["NPU_DENSE"]
