"""Checkpoints of the known families as the files that a check reads, written without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npufleet.cluster.checkpoint import known
from npufleet.cluster.checkpoint.files import BITS, Shape
from npufleet.cluster.plan.model import from_config

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_moe": {**COMMON, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]},
    "mixtral": {**COMMON, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**COMMON, **LATENT, "model_type": "deepseek_v3", "q_lora_rank": 24},
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}

Entries = dict[str, tuple[str, Shape]]
"""Tensor name → dtype and shape."""


def entries(kind: str, *, quantized: bool = False) -> Entries:
    """The tensors of a whole checkpoint; quantized ones with int8 weights and their scales."""
    config = CONFIGS[kind]
    found: Entries = {}
    for part in known.expected(from_config(config), "model.", head=not config["tie_word_embeddings"]):
        name = f"{part.module}.{part.leaf}"
        if quantized and part.linear:
            found[name] = ("I8", part.shape)
            found[f"{part.module}.weight_scale"] = ("BF16", (part.shape[0], 1))
        else:
            found[name] = ("BF16", part.shape)
    return found


def safetensors(tensors: Mapping[str, tuple[str, Shape]]) -> bytes:
    """A file with zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, Shape]]) -> Path:
    """Write a checkpoint of one file, with a tokenizer."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder
