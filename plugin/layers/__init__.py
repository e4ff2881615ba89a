"""Replacements for vLLM's layers that the NPU computes with fused operators."""


def register_custom_ops() -> None:
    """Register every replacement under the class name that models instantiate; those already there stay."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    from . import activation, norm, rotary

    for name, layer in {**norm.LAYERS, **activation.LAYERS, **rotary.LAYERS}.items():
        if name not in op_registry_oot:
            CustomOp.register_oot(layer, name=name)
