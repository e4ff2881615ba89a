"""A small tokenizer directory made at test time: one token per byte, a chat template, a tiny Llama config."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = (EOS, "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL)
MAX_MODEL_LEN = 512


def make_tokenizer_dir(directory: Path) -> Path:
    """Write the files of a tokenizer and model configuration into ``directory`` and return it.

    Token ids 0 to 255 are single characters (the printable forms of bytes, in sorted order), then the special
    ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS,
                "pad_token": EOS,
                "model_max_length": MAX_MODEL_LEN,
                "chat_template": TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    eos = tokenizer.token_to_id(EOS)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": MAX_MODEL_LEN,
                "torch_dtype": "float32",
                "eos_token_id": eos,
                "bos_token_id": None,
                "tie_word_embeddings": True,
            }
        )
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory


def load(directory: Path) -> Tokenizer:
    """The tokenizer in ``directory``."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
