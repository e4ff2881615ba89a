"""The vLLM hardware plugin: what vLLM's entry points call.

Both functions are called in every process that vLLM starts, some of them twice, so they are cheap and re-entrant.
"""


def register() -> str:
    """Platform entry point: the import path of the platform class."""
    return "npufleet.plugin.platform.NPUPlatform"


def register_layers() -> None:
    """General entry point: put our layers, attention backends and models into vLLM's registries."""
