"""Replacements for vLLM's layers that the NPU computes with fused operators."""


def register_custom_ops() -> None:
    """Register every replacement under the class name that models instantiate; those already there stay."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

    from . import activation, mla, norm, rotary

    for name, layer in {**norm.LAYERS, **activation.LAYERS, **rotary.LAYERS}.items():
        if name not in op_registry_oot:
            CustomOp.register_oot(layer, name=name)
    for name, block in mla.LAYERS.items():
        if name not in op_registry_oot:
            PluggableLayer.register_oot(block, name=name)
