"""Tiny checkpoints for the plugin's tests, and engines over them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from vllm import LLM

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


@pytest.fixture(scope="session")
def tiny_llama(checkpoint: Callable[..., Path]) -> "Callable[..., AbstractContextManager[LLM]]":
    """``tiny_llama(**arguments)``: a whole engine in this process over a tiny float32 Llama, as a context."""

    @contextmanager
    def run(**arguments: Any) -> "Iterator[LLM]":
        from vllm import LLM

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            engine = LLM(
                model=str(checkpoint("llama", weights=True)),
                dtype="float32",
                skip_tokenizer_init=True,
                max_model_len=512,
                gpu_memory_utilization=0.05,
                **arguments,
            )
            yield engine
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()

    return run
