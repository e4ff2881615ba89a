"""Quantized checkpoints: which formats NPUs run, and through which of vLLM's hooks.

A format that is not in :data:`FORMATS` is refused by name before any process starts.
"""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMATS = {
    "compressed-tensors": "llm-compressor's W8A8 (experts: dynamic activations) and W4A16",
    "ascend": "ModelSlim's W8A8 and W8A8_DYNAMIC; experts W8A8_DYNAMIC",
    "fp8": "FP8 weights by block (DeepSeek V3), which become the model's dtype when loaded",
}
"""Names of vLLM's quantization methods → what of each is supported."""


def check_quantization(name: str) -> None:
    """:raises ValueError: a format that NPUs do not run, with those that they do."""
    if name not in FORMATS:
        _refuse(f"quantization {name!r}")


def check_configuration(config: "VllmConfig") -> None:
    """:raises ValueError: a plain checkpoint that vLLM would quantize while it loads it."""
    quantization = config.quant_config
    if quantization is not None and not type(quantization).__module__.startswith(__name__):
        _refuse(f"quantization {config.model_config.quantization!r} of a checkpoint while it is loaded")


def _refuse(what: str) -> None:
    supported = "; ".join(f"{key!r}: {form}" for key, form in FORMATS.items())
    raise ValueError(
        f"{what} is not supported on NPU yet; use a bfloat16 or float16 checkpoint, or one that has one of these "
        f"formats: {supported}"
    )


@functools.cache
def register_quantization() -> None:
    """Register the configurations of the supported formats and the linear kernels; again changes nothing."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from .compressed_tensors import NPUCompressedTensorsConfig
    from .fp8_block import NPUFp8Config
    from .linear import NPUInt8LinearKernel
    from .mixed import NPUMixedPrecisionKernel
    from .modelslim import NAME, ModelSlimConfig

    register_quantization_config("compressed-tensors")(NPUCompressedTensorsConfig)
    register_quantization_config("fp8")(NPUFp8Config)
    register_quantization_config(NAME)(ModelSlimConfig)
    register_linear_kernel(NPUInt8LinearKernel, PlatformEnum.OOT, "int8")
    register_linear_kernel(NPUMixedPrecisionKernel, PlatformEnum.OOT, "mp")
