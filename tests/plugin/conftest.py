"""Tiny checkpoints for the plugin's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 128

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        architectures=["LlamaForCausalLM"],
    ),
    "mistral": lambda: MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=32,
        max_position_embeddings=1024,
        architectures=["MistralForCausalLM"],
    ),
    "bert": lambda: BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        architectures=["BertModel"],
    ),
    "mixture": lambda: Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_experts=4,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "mla": lambda: DeepseekV3Config(
        vocab_size=VOCABULARY, num_hidden_layers=2, architectures=["DeepseekV3ForCausalLM"]
    ),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, architectures=["MambaForCausalLM"]
    ),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(kind, weights=False, **changes)``: a directory with a configuration."""
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str, weights: bool = False, **changes: object) -> Path:
        key = (kind, weights, *sorted(changes.items()))
        if key not in made:
            config = CONFIGS[kind]()
            config.update(changes)
            made[key] = tmp_path_factory.mktemp(kind)
            if weights:
                save_random_weights(config, made[key])
            else:
                config.save_pretrained(made[key])
        return made[key]

    return make


def save_random_weights(config: PretrainedConfig, directory: Path) -> None:
    """Weights of a spread that makes greedy tokens depend on the whole context, the same in every run."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25) if parameter.dim() > 1 else None
    model.save_pretrained(directory)
