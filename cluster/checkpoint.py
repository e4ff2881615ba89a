"""What can be seen of a broken checkpoint before anything starts: a second's look instead of a minute's start.

Only files are read, of weights only the headers. What needs vLLM or torch to be seen is left to the engine.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_TOKENIZERS = ("token", "vocab", "tekken", "spiece", "sentencepiece", "merges")
_TOKENIZER_ENDINGS = (".model", ".tiktoken")
Shape = tuple[int, ...]

_LAYER = re.compile(r"(?P<stem>.*\blayers)\.(?P<number>\d+)\.(?P<module>.+)\.(?P<leaf>[^.]+\.[^.]+)")


def check(model: str, source: Path, engine: Mapping[str, Any]) -> list[str]:
    """Look at the checkpoint folder ``source`` of the model deployment ``model`` with its engine arguments.

    Returns what looks odd but may be meant so.

    Raises:
        ValueError: naming the model, the file and what is wrong with it.
    """
    found: dict[str, Shape] = {}
    try:
        config = _config(source)
        _check_split(config, engine)
        if engine.get("load_format", "auto") in ("auto", "hf", "safetensors"):
            found = _check_weights(source)
        if not engine.get("tokenizer") and not engine.get("skip_tokenizer_init"):
            _check_tokenizer(source)
    except ValueError as error:
        raise ValueError(f"model {model!r}: {error}") from error
    return [f"model {model!r}: {doubt}" for doubt in doubts(found)]


def doubts(tensors: Mapping[str, Shape]) -> list[str]:
    """Return where a layer lacks a tensor that the same module has in most other layers, or alone has it in
    another shape.

    vLLM leaves a linear layer whose weight is missing as the memory was: it serves, and answers nonsense. A
    wrong shape is an error there, of which only the numbers are told.
    """
    modules: dict[tuple[str, str], dict[int, dict[str, Shape]]] = {}
    for name, shape in tensors.items():
        if match := _LAYER.fullmatch(name):
            layers = modules.setdefault((match["stem"], match["module"]), {})
            layers.setdefault(int(match["number"]), {})[match["leaf"]] = shape
    return [line for (stem, module), layers in sorted(modules.items()) for line in _odd(stem, module, layers)]


def _odd(stem: str, module: str, layers: Mapping[int, Mapping[str, Shape]]) -> Iterator[str]:
    for leaf in sorted({leaf for leaves in layers.values() for leaf in leaves}):
        shapes = {number: leaves[leaf] for number, leaves in layers.items() if leaf in leaves}
        lacking = sorted(layers.keys() - shapes) if len(shapes) > len(layers) / 2 else []
        for number in lacking:
            yield f"the weights lack {stem}.{number}.{module}.{leaf}, which most other layers have"
        (usual, often), *others = Counter(shapes.values()).most_common()
        for shape, count in others:
            if count == 1 and often == len(shapes) - 1 > 1:
                (number,) = (number for number, found in shapes.items() if found == shape)
                yield (
                    f"{stem}.{number}.{module}.{leaf} has the shape {list(shape)}, "
                    f"in all other layers it is {list(usual)}"
                )


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    if not file.is_file():
        raise ValueError(
            f"its source is {str(source)!r}; expected a folder with a Hugging Face checkpoint (config.json)"
        )
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Raises:
        ValueError: if it cannot be read or holds something else.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; expected a JSON object")
    return found


def _check_split(config: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """vLLM gives every rank of a tensor-parallel group the same number of attention heads."""
    if engine.get("hf_overrides"):
        return
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    size = engine.get("tensor_parallel_size", 1)
    if isinstance(heads, int) and heads > 0 and heads % size:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"tensor_parallel_size is {size}, which does not divide its {heads} attention heads; "
            f"possible are {fitting}"
        )


def _check_weights(source: Path) -> dict[str, Shape]:
    """Return the tensors, as far as they can be read."""
    if (source / INDEX).is_file():
        return _check_index(source)
    found: dict[str, Shape] = {}
    files = sorted(source.glob("*.safetensors"))
    for file in files:
        found |= tensors(file)
    if not files and not any(path.suffix in _WEIGHTS for path in source.iterdir()):
        raise ValueError(f"{source} holds no weights; expected *.safetensors")
    return found


def _check_index(source: Path) -> dict[str, Shape]:
    listed = read_json(source / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{source / INDEX} has no weight_map from tensor names to file names")
    files: dict[str, dict[str, Shape]] = {}
    for name in sorted(set(listed.values())):
        if not (source / name).is_file():
            raise ValueError(f"{source} lacks {name}, which {INDEX} lists; fetch it again")
        files[name] = tensors(source / name)
    for tensor, name in listed.items():
        if tensor not in files[name]:
            raise ValueError(f"{source / name} lacks the tensor {tensor!r}, which {INDEX} lists")
    return {tensor: files[name][tensor] for tensor, name in listed.items()}


def tensors(file: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors in a safetensors file, whose size must be what its header says.

    The format: 8 bytes little-endian length, a JSON header with each tensor's ``data_offsets``, the data
    (https://huggingface.co/docs/safetensors).

    Raises:
        ValueError: if it is not such a file or is not whole.
    """
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"{file} has {size} bytes and no safetensors header in them; fetch it again")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} has no safetensors header: {error}") from error
    try:
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file} has a header that is not of safetensors: {error!r}") from error
    if size != wanted:
        raise ValueError(
            f"{file} has {size} bytes, its header describes {wanted}: it is not whole, fetch it again"
        )
    return shapes


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
