"""Quantized checkpoints: which formats NPUs run, and through which of vLLM's hooks.

A format that is not in :data:`FORMATS` is refused by name before any process starts.
"""

import functools

FORMATS = {
    "compressed-tensors": "W8A8 with int8 weights, dynamic or static activations (llm-compressor)",
}
"""Names of vLLM's quantization methods → what of each is supported."""


def check_quantization(name: str) -> None:
    """:raises ValueError: a format that NPUs do not run, with those that they do."""
    if name not in FORMATS:
        supported = "; ".join(f"{key!r}: {what}" for key, what in FORMATS.items())
        raise ValueError(
            f"quantization {name!r} is not supported on NPU yet; use a bfloat16 or float16 checkpoint, or one of "
            f"these formats: {supported}"
        )


@functools.cache
def register_quantization() -> None:
    """Register the configurations of the supported formats and the linear kernels; again changes nothing."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from .compressed_tensors import NPUCompressedTensorsConfig
    from .linear import NPUInt8LinearKernel

    register_quantization_config("compressed-tensors")(NPUCompressedTensorsConfig)
    register_linear_kernel(NPUInt8LinearKernel, PlatformEnum.OOT, "int8")
