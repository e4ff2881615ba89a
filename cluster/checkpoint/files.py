"""The files of a checkpoint, of weights only the headers: which tensors there are, in what shape and dtype.

Whatever a file says that cannot be so is a ``ValueError`` that names the file and how to mend it.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
"""Bits of an element by its dtype in a safetensors header."""
FLOATS = ("F64", "F32", "F16", "BF16")
WEIGHT_LEAVES = ("weight", "weight_packed", "qweight")
"""What a linear layer's values are called: as they are, or packed by compressed-tensors or GPTQ."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a checkpoint."""

    shape: Shape
    dtype: str  # as safetensors names it: BF16, I8 …
    file: str  # the name of the file that holds it


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


def weights(source: Path) -> dict[str, Stored]:
    """Return the tensors of the checkpoint in the folder ``source``; none if they are in files of another format.

    Of an indexed checkpoint vLLM reads the files that the index lists, and whatever is in them.

    Raises:
        ValueError: for a file that is missing, is not whole or does not hold what the index says.
    """
    if (source / INDEX).is_file():
        return _indexed(source)
    files = sorted(source.glob("*.safetensors"))
    if not files and not any(path.suffix in WEIGHTS for path in source.iterdir()):
        raise ValueError(f"{source} holds no weights; expected *.safetensors")
    _check_parts(source, {file.name for file in files})
    found: dict[str, Stored] = {}
    for file in files:
        found |= tensors(file)
    return found


def _check_parts(source: Path, names: set[str]) -> None:
    """Files that count themselves (``model-00001-of-00003.safetensors``) must all be there."""
    for match in filter(None, map(_PART.fullmatch, sorted(names))):
        for number in range(1, int(match["count"]) + 1):
            name = f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
            if name not in names:
                raise ValueError(
                    f"{source} lacks {name}, one of the {int(match['count'])} parts; fetch it again"
                )


def _indexed(source: Path) -> dict[str, Stored]:
    listed = read_json(source / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{source / INDEX} has no weight_map from tensor names to file names")
    found: dict[str, Stored] = {}
    for name in sorted(set(listed.values())):
        if not (source / name).is_file():
            raise ValueError(f"{source} lacks {name}, which {INDEX} lists; fetch it again")
        held = tensors(source / name)
        lacking = [tensor for tensor, file in listed.items() if file == name and tensor not in held]
        if lacking:
            more = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
            raise ValueError(
                f"{source / name} lacks the tensor {lacking[0]!r}{more}, which {INDEX} lists; fetch the file again"
            )
        found |= held
    return found


def tensors(file: Path) -> dict[str, Stored]:
    """Return the tensors in a safetensors file, whose size must be what its header says.

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
        found = {name: _stored(name, entry, file) for name, entry in header.items()}
        wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file} has a header that is not of safetensors: {error!r}") from error
    if size != wanted:
        raise ValueError(
            f"{file} has {size} bytes, its header describes {wanted}: it is not whole, fetch it again"
        )
    return found


def _stored(name: str, entry: Mapping[str, Any], file: Path) -> Stored:
    made = Stored(shape=tuple(entry["shape"]), dtype=str(entry["dtype"]), file=file.name)
    begin, end = entry["data_offsets"]
    bits = BITS.get(made.dtype)
    if bits is not None and (end - begin) * 8 != math.prod(made.shape) * bits:
        raise ValueError(
            f"{file}: {name} has {end - begin} bytes, but {list(made.shape)} elements of {made.dtype} take "
            f"{math.prod(made.shape) * bits // 8}; the file is damaged, fetch it again"
        )
    return made
