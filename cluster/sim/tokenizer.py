"""A small model folder for simulated engines: a tokenizer of one token per byte and a configuration."""

from __future__ import annotations

import json
from pathlib import Path

END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = (END, "<|system|>", "<|user|>", "<|assistant|>")


def write(folder: Path, max_model_len: int) -> Path:
    """Write the folder's files and return it; token ids 0 to 255 are bytes, then come the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_model_len,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(alphabet) + len(_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(END),
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(model))
    return folder
