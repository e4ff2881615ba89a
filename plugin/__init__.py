"""The vLLM hardware plugin: what vLLM's entry points call.

Both functions are called in every process that vLLM starts, some of them twice, so they are cheap and
re-entrant.
"""


def register() -> str:
    """Platform entry point: the import path of the platform class."""
    return "npufleet.plugin.platform.NPUPlatform"


def register_layers() -> None:
    """General entry point: put our layers and attention backends into vLLM's registries.

    Runs in the front end, the engine core and every worker, before or after a configuration exists; a second
    call changes nothing.
    """
    from .attention import register_backends
    from .layers import register_custom_ops
    from .moe import register_moe_layers
    from .quantization import register_quantization

    register_backends()
    register_custom_ops()
    register_moe_layers()
    register_quantization()
