"""Mixture of experts: routers, experts and the ways of bringing tokens and experts together."""


def register_moe_layers() -> None:
    """Register the replacements of vLLM's runner, of its holder of experts and their method, and of the linear
    layers that shared experts may have; those already there stay.
    """
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

    from .experts import NPUUnquantizedFusedMoEMethod
    from .own_ranks import NPURoutedExperts
    from .runner import NPUMoERunner
    from .shared_linear import LAYERS

    for name, layer in {"MoERunner": NPUMoERunner, "RoutedExperts": NPURoutedExperts, **LAYERS}.items():
        if name not in op_registry_oot:
            PluggableLayer.register_oot(layer, name=name)
    if "UnquantizedFusedMoEMethod" not in op_registry_oot:
        CustomOp.register_oot(NPUUnquantizedFusedMoEMethod, name="UnquantizedFusedMoEMethod")
