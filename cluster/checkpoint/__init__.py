"""What can be seen of a broken checkpoint before anything starts: a second's look instead of a minute's start.

Only files are read, of weights only the headers. What needs vLLM or torch to be seen is left to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plan.model import DENSE, LATENT, MOE, ModelShape, from_config
from . import split, tensors
from .files import INDEX, read_json, weights

__all__ = ["INDEX", "check", "read_json"]

_TOKENIZERS = ("token", "vocab", "tekken", "spiece", "sentencepiece", "merges")
_TOKENIZER_ENDINGS = (".model", ".tiktoken")


def check(model: str, source: Path, engine: Mapping[str, Any]) -> list[str]:
    """Look at the checkpoint folder ``source`` of the model deployment ``model`` with its engine arguments.

    Returns what looks odd but may be meant so.

    Raises:
        ValueError: naming the model, the file and what is wrong with it.
    """
    try:
        doubts = _check(source, engine)
    except ValueError as error:
        raise ValueError(f"model {model!r}: {error}") from error
    return [f"model {model!r}: {doubt}" for doubt in doubts]


def _check(source: Path, engine: Mapping[str, Any]) -> list[str]:
    doubts: list[str] = []
    config = _config(source)
    shape = None
    if not engine.get("hf_overrides"):  # what it overrides is not in the file
        shape = _shape(config, source)
        split.check(config, engine, shape)
    if engine.get("load_format", "auto") in ("auto", "hf", "safetensors"):
        found = weights(source)
        if found:
            doubts = tensors.check(source, found, config, shape)
            if (source / tensors.DESCRIPTION).is_file():
                tensors.described(source, found, read_json(source / tensors.DESCRIPTION))
    if not engine.get("tokenizer") and not engine.get("skip_tokenizer_init"):
        _check_tokenizer(source)
    return doubts


def _shape(config: Mapping[str, Any], source: Path) -> ModelShape | None:
    """The model's sizes, None for families that are not known by name."""
    if config.get("model_type") not in (*DENSE, *MOE, *LATENT):
        return None
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    return from_config(plain, str(source / "config.json"))  # whatever its format: shapes and splits are those


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    if not file.is_file():
        raise ValueError(
            f"its source is {str(source)!r}; expected a folder with a Hugging Face checkpoint (config.json)"
        )
    return read_json(file)


def _check_tokenizer(source: Path) -> None:
    for file in (source / "tokenizer.json", source / "tokenizer_config.json"):
        if file.is_file():
            read_json(file)
    for path in source.iterdir():
        if path.name.startswith(_TOKENIZERS) or path.name.endswith(_TOKENIZER_ENDINGS):
            return
    raise ValueError(
        f"{source} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json …); "
        "copy it there, or set engine.tokenizer to a folder that has one"
    )
