"""Attention backends of the NPU platform and their names in vLLM's registry."""

BACKENDS = {"NPU_DENSE": "npufleet.plugin.attention.dense.AscendAttentionBackend"}
"""Name in ``AttentionBackendEnum`` → class path. vLLM looks the name of a layer's backend up in that
enumeration.
"""


def register_backends() -> None:
    """Add our backends to ``AttentionBackendEnum``; those already there stay."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
