"""Mixture of experts: routers, experts and the ways of bringing tokens and experts together."""


def register_moe_layers() -> None:
    """Register the replacements of vLLM's runner and of its method for unquantized experts; those already
    there stay.
    """
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

    from .experts import NPUUnquantizedFusedMoEMethod
    from .runner import NPUMoERunner

    if "MoERunner" not in op_registry_oot:
        PluggableLayer.register_oot(NPUMoERunner, name="MoERunner")
    if "UnquantizedFusedMoEMethod" not in op_registry_oot:
        CustomOp.register_oot(NPUUnquantizedFusedMoEMethod, name="UnquantizedFusedMoEMethod")
