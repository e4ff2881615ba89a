"""Tiny random checkpoints, one for each model feature that attention and layers must get right.

A checkpoint is written when a test asks for it, from a fixed seed, in the format that both Hugging Face
transformers and vLLM read. The weights are scaled so that attention, positions and norms all matter for the
result, and so that the two largest logits of a greedy step are clearly apart: a token that differs is then
an error, not rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 320
MAX_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What makes one tiny model.

    ``config`` holds transformers configuration keys besides the common ones. ``without`` are the same keys
    with the feature under test switched off: the tests check that the answer then changes, so a backend that
    ignores the feature cannot pass.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] | None = None
    seed: int = 0

    def full_config(self, *, feature: bool = True) -> dict[str, Any]:
        """The configuration as keyword arguments of the transformers config class."""
        common: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_LEN,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        common.update(self.config)
        if not feature and self.without is not None:
            common.update(self.without)
        return common


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": "default", **scaling}


PLAIN = {"rope_parameters": _rope()}
LLAMA3 = _rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = _rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CHECKPOINTS = (
    Checkpoint(name="llama", model_type="llama", config=PLAIN),
    Checkpoint(
        name="llama-3-rope", model_type="llama", config={"rope_parameters": LLAMA3}, without=PLAIN, seed=5
    ),
    Checkpoint(name="llama-yarn", model_type="llama", config={"rope_parameters": YARN}, without=PLAIN),
    Checkpoint(
        name="llama-tp",
        model_type="llama",
        seed=2,
        config={**PLAIN, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    Checkpoint(name="qwen2", model_type="qwen2", config=PLAIN),
    Checkpoint(name="qwen2-yarn", model_type="qwen2", config={"rope_parameters": YARN}, without=PLAIN),
    Checkpoint(name="qwen3", model_type="qwen3", config=PLAIN, seed=3),
    Checkpoint(
        name="mistral",
        model_type="mistral",
        config={**PLAIN, "sliding_window": 24},
        without={"sliding_window": None},
    ),
    Checkpoint(
        name="gemma",
        model_type="gemma",
        config={
            **PLAIN,
            "num_key_value_heads": 1,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    Checkpoint(
        name="gemma3",
        model_type="gemma3_text",
        config={
            "num_hidden_layers": 4,
            "layer_types": GEMMA3_LAYERS,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _rope(rope_theta=100000.0, rope_type="linear", factor=4.0),
                "sliding_attention": _rope(),
            },
        },
        without={"layer_types": ["full_attention"] * 4},
        seed=1,
    ),
    Checkpoint(
        name="glm4",
        model_type="glm4",
        config={"rope_parameters": _rope(partial_rotary_factor=0.5), "rms_norm_eps": 1e-6},
        without={"rope_parameters": _rope(partial_rotary_factor=1.0)},
        seed=1,
    ),
    Checkpoint(
        name="mixtral",
        model_type="mixtral",
        config={**PLAIN, "num_local_experts": 8, "num_experts_per_tok": 2},
        without={"num_experts_per_tok": 1},
        seed=7,
    ),
    Checkpoint(
        name="mixtral-top-1",
        model_type="mixtral",
        config={**PLAIN, "num_local_experts": 8, "num_experts_per_tok": 1},
        without={"num_experts_per_tok": 2},
        seed=3,
    ),
    Checkpoint(
        name="qwen3-moe",
        model_type="qwen3_moe",
        config={
            **PLAIN,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        without={"norm_topk_prob": False},
    ),
    Checkpoint(
        name="glm4-moe",
        model_type="glm4_moe",
        config={
            "rope_parameters": _rope(partial_rotary_factor=0.5),
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
        without={"n_group": 1, "topk_group": 1},
        seed=11,
    ),
)
LATENT_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 64,
}
"""The sizes that the NPU's operators take, whatever else is tiny; all layers dense."""
V3_YARN = _rope(
    rope_type="yarn",
    factor=40.0,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
"""The published scaling of DeepSeek V3, from a shorter original length."""
LATENT_EXPERTS = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
V3_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""As published: transformers' class knows no other router, vLLM asks."""

LATENT_CHECKPOINTS = (
    Checkpoint(
        name="deepseek-v2",
        model_type="deepseek_v2",
        config={**PLAIN, **LATENT_HEADS, "q_lora_rank": None},
    ),
    Checkpoint(
        name="deepseek-v3",
        model_type="deepseek_v3",
        config={**LATENT_HEADS, "rope_parameters": V3_YARN, "q_lora_rank": 96},
        without=PLAIN,
        seed=34,
    ),
    Checkpoint(
        name="deepseek-v2-moe",
        model_type="deepseek_v2",
        config={
            **PLAIN,
            **LATENT_HEADS,
            **LATENT_EXPERTS,
            "q_lora_rank": 96,
            "topk_method": "group_limited_greedy",
        },
        seed=1,
    ),
    Checkpoint(
        name="deepseek-v3-moe",
        model_type="deepseek_v3",
        config={
            **LATENT_HEADS,
            **LATENT_EXPERTS,
            **V3_ROUTER,
            "rope_parameters": V3_YARN,
            "q_lora_rank": 96,
        },
    ),
    Checkpoint(
        name="kimi-k2",
        model_type="deepseek_v3",
        config={
            **LATENT_HEADS,
            **LATENT_EXPERTS,
            **V3_ROUTER,
            "rope_parameters": {**V3_YARN, "factor": 32.0},
            "q_lora_rank": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
        seed=2,
    ),
)
"""Multi-head latent attention: DeepSeek V2 without and V3 with a low rank of the queries, then with experts; Kimi
K2 has one group of experts, and here a number of heads that the operator takes only after padding.
"""

PROLOG_CHECKPOINT = Checkpoint(
    name="deepseek-v3-wide",
    model_type="deepseek_v3",
    config={
        **LATENT_HEADS,
        "rope_parameters": V3_YARN,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    },
    without=PLAIN,
    seed=5,
)
"""DeepSeek V3's attention in its published sizes but for the number of heads: what npu_mla_prolog_v3 takes."""

GATED_CHECKPOINT = Checkpoint(
    name="qwen2-moe",
    model_type="qwen2_moe",
    config={
        **PLAIN,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": False,
    },
    seed=3,
)
"""A shared expert whose output each token scales by a gate."""

ALL = (*CHECKPOINTS, *LATENT_CHECKPOINTS, PROLOG_CHECKPOINT, GATED_CHECKPOINT)
BY_NAME = {checkpoint.name: checkpoint for checkpoint in ALL}


def build_model(checkpoint: Checkpoint, *, feature: bool = True) -> PreTrainedModel:
    """The random model in fp32 on the CPU, eager attention, every parameter from ``checkpoint.seed``."""
    config = AutoConfig.for_model(checkpoint.model_type, **checkpoint.full_config(feature=feature))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    draw = torch.Generator().manual_seed(checkpoint.seed)
    gemma = checkpoint.model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_draw(name, weight, draw, gemma=gemma))
        for name, weight in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):  # comparable with the scores, sigmoids of the logits
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    return model.eval()


def _draw(name: str, weight: torch.Tensor, draw: torch.Generator, *, gemma: bool) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=draw)
    if name == "model.norm.weight" and gemma:
        # Gemma ties the output matrix to the embedding: small embeddings let the layers decide the next token
        # (large ones would repeat the last token), and the last norm brings the logits back to a deviation of
        # several units.
        return noise * 10.0 + 120.0
    if "norm" in name:  # around one; Gemma stores the weight as the distance from one
        return noise * 0.2 + (0.0 if gemma else 1.0)
    if name.endswith("bias"):
        return noise * 0.5
    if "embed_tokens" in name:
        return noise * (0.005 if gemma else 0.5)
    fan_in = weight.shape[-1]
    gain = (
        8.0 if "lm_head" in name else 1.6
    )  # logits with a deviation near 8; attention neither flat nor one-hot
    return noise * (gain / fan_in**0.5)


def write(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write the checkpoint as a Hugging Face folder and return it (no tokenizer: tests use token ids)."""
    path = folder / checkpoint.name
    if not (path / "config.json").exists():
        build_model(checkpoint).save_pretrained(path)
        generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path
