"""Request fields that the VllmEngine messages lack, carried as binary gRPC metadata.

``vllm.grpc.engine.GenerateRequest`` has no place for a cache salt, a priority, a LoRA adapter, bad words, a
seed beyond 32 bits and others. They travel in the metadata key :data:`EXTENSION_KEY` as one msgpack map
``{"v": 1, <field>: <value>, ...}`` that holds only what differs from the default. An engine that understands
the map says so (``features.py``); an engine that does not ignores it, so a sender must ask first.

The codec is strict on both ends: a wrong type, an unknown field or an unknown version raises
:class:`ExtensionError`, which servers answer as ``INVALID_ARGUMENT``. Nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgpack

EXTENSION_KEY = "x-npufleet-ext-bin"
MODEL_KEY = "x-npufleet-model"
"""Metadata key with which a client of the router names the model deployment it wants."""
RANK_KEY = "x-data-parallel-rank"
"""Metadata key (vLLM's own name of the HTTP header) with the data-parallel rank that a router means, for routers that
cannot write it into the request. It is a wish: a rank that the engine does not have is none."""
VERSION = 1

METADATA_LIMIT = 16 * 1024
"""Bytes of request metadata that a gRPC server takes at most (gRPC core's absolute default)."""
MAX_ENCODED_BYTES = 11 * 1024
"""Longest encoded extension, bytes. On the wire it may grow by 4/3 (base64) and shares the limit with the
rest."""

Value = Any
"""What msgpack carries: None, bool, int, float, str, bytes, and lists and maps of those."""


class ExtensionError(ValueError):
    """An extension that cannot be encoded or understood; ``field`` names the culprit where there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def _is_int(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_bool(value: Value) -> bool:
    return isinstance(value, bool)


def _is_text(value: Value) -> bool:
    return isinstance(value, str)


def _is_text_list(value: Value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_id_list(value: Value) -> bool:
    return isinstance(value, list) and all(_is_int(item) and 0 <= item < 2**31 for item in value)


def _is_map(value: Value) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _record(**members: Callable[[Value], bool]) -> Callable[[Value], bool]:
    """A map whose keys are among ``members`` and whose values pass their checks."""

    def check(value: Value) -> bool:
        return _is_map(value) and all(key in members and members[key](item) for key, item in value.items())

    return check


Rule = tuple[str, Callable[[Value], bool]]

REQUEST_FIELDS: Mapping[str, Rule] = {
    "priority": ("an integer", _is_int),
    "cache_salt": ("a string", _is_text),
    "session_id": ("a string", _is_text),
    "lora": (
        "a map of name, id, path, base_model and load_inplace",
        _record(name=_is_text, id=_is_int, path=_is_text, base_model=_is_text, load_inplace=_is_bool),
    ),
    "reasoning_ended": ("a boolean", _is_bool),
    "reasoning_parser_kwargs": ("a map with string keys", _is_map),
}
"""Arguments of the engine's ``generate`` beyond prompt and sampling parameters."""

SAMPLING_FIELDS: Mapping[str, Rule] = {
    "seed": ("an integer of 64 bits", _is_int),
    "bad_words": ("a list of strings", _is_text_list),
    "allowed_token_ids": ("a list of token ids", _is_id_list),
    "logprob_token_ids": ("a list of token ids", _is_id_list),
    "trace_decode_token_ids": ("a list of token ids", _is_id_list),
    "skip_reading_prefix_cache": ("a boolean", _is_bool),
    "thinking_token_budget": ("an integer", _is_int),
    "watermarking": ("a boolean", _is_bool),
    "stream_interval": ("an integer", _is_int),
    "extra_args": ("a map with string keys", _is_map),
    "repetition_detection": (
        "a map of max_pattern_size, min_pattern_size and min_count",
        _record(max_pattern_size=_is_int, min_pattern_size=_is_int, min_count=_is_int),
    ),
    "structured_outputs": (
        "a map of disable_any_whitespace, disable_additional_properties and whitespace_pattern",
        _record(
            disable_any_whitespace=_is_bool,
            disable_additional_properties=_is_bool,
            whitespace_pattern=_is_text,
        ),
    ),
}
"""Members of vLLM's ``SamplingParams`` that the protobuf ``SamplingParams`` lacks or narrows."""

RESPONSE_FIELDS: Mapping[str, Rule] = {
    "logprob_ranks": ("a boolean", _is_bool),
}
"""Wishes about the answer. ``logprob_ranks``: each ``TopLogProbs`` holds *all* alternatives with the chosen
token first, and one id more than values: that last id is the vocabulary rank (1 = most likely) of the chosen
token."""

FIELDS: Mapping[str, Rule] = {**REQUEST_FIELDS, **SAMPLING_FIELDS, **RESPONSE_FIELDS}


def _check(name: str, value: Value) -> None:
    rule = FIELDS.get(name)
    if rule is None:
        raise ExtensionError(
            f"unknown field {name!r} in {EXTENSION_KEY}; this engine knows: {', '.join(sorted(FIELDS))}", name
        )
    expected, accepts = rule
    if not accepts(value):
        raise ExtensionError(f"{name} must be {expected}, got {_shorten(value)}", name)


def _shorten(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def encode(fields: Mapping[str, Value]) -> bytes | None:
    """The metadata value for ``fields`` (non-default fields only), or None when there are none.

    Raises :class:`ExtensionError` for an unknown field, a wrong type, or more than :data:`MAX_ENCODED_BYTES`;
    the last names the largest field.
    """
    if not fields:
        return None
    for name, value in fields.items():
        _check(name, value)
    try:
        data: bytes = msgpack.packb({"v": VERSION, **fields})
    except (TypeError, OverflowError, ValueError) as error:
        raise ExtensionError(f"request fields that cannot be sent to an engine: {error}") from error
    if len(data) > MAX_ENCODED_BYTES:
        largest = max(fields, key=lambda name: len(msgpack.packb(fields[name])))
        raise ExtensionError(
            f"{largest} is too large: such request fields may take {MAX_ENCODED_BYTES} bytes together, "
            f"these take {len(data)}",
            largest,
        )
    return data


def decode(data: bytes) -> dict[str, Value]:
    """The fields in a metadata value, without the version; raises :class:`ExtensionError` if anything is
    wrong."""
    try:
        message = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData) as error:
        raise ExtensionError(f"{EXTENSION_KEY} is not a msgpack map: {error}") from error
    if not _is_map(message):
        raise ExtensionError(f"{EXTENSION_KEY} must be a map with string keys, got {type(message).__name__}")
    version = message.pop("v", None)
    if version != VERSION:
        raise ExtensionError(f"{EXTENSION_KEY} has version {version!r}, this engine reads version {VERSION}")
    for name, value in message.items():
        _check(name, value)
    return message


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, Value]:
    """The extension fields in the metadata of a call; empty when the key is absent. Raises as
    :func:`decode`."""
    for key, value in metadata or ():
        if key == EXTENSION_KEY:
            if not isinstance(value, bytes):
                raise ExtensionError(f"{EXTENSION_KEY} must be binary metadata")
            return decode(value)
    return {}
