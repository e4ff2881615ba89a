"""Attention backends of the NPU platform and their names in vLLM's registry."""

BACKENDS = {
    "NPU_DENSE": "npufleet.plugin.attention.dense.AscendAttentionBackend",
    "NPU_MLA": "npufleet.plugin.attention.mla.AscendMLABackend",
    "NPU_MLA_ROPE": "npufleet.plugin.attention.mla_cache.RopeCacheBackend",
}
"""Name in ``AttentionBackendEnum`` → class path. vLLM looks the name of a layer's backend up in that
enumeration.
"""
LAYER_BACKENDS = ("NPU_DENSE", "NPU_MLA")
"""Those that attend, which a user may name."""


def register_backends() -> None:
    """Add our backends to ``AttentionBackendEnum``; those already there stay."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
