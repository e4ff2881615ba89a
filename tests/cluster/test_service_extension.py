"""The metadata extension: what goes in comes out, and nothing wrong goes through."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.proto import extension, features
from npufleet.cluster.proto.extension import EXTENSION_KEY, ExtensionError

_int64 = st.integers(-(2**63), 2**63 - 1)
_ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
_text = st.text(max_size=30)
_fields = st.fixed_dictionaries(
    {},
    optional={
        "priority": _int64,
        "seed": _int64,
        "cache_salt": _text,
        "session_id": _text,
        "reasoning_ended": st.booleans(),
        "bad_words": st.lists(_text, max_size=5),
        "allowed_token_ids": _ids,
        "logprob_token_ids": _ids,
        "skip_reading_prefix_cache": st.booleans(),
        "lora": st.fixed_dictionaries({"name": _text, "id": st.integers(1, 2**31), "path": _text}),
        "extra_args": st.dictionaries(_text, st.one_of(_text, _int64, st.none(), _ids), max_size=4),
        "structured_outputs": st.fixed_dictionaries({}, optional={"disable_any_whitespace": st.booleans()}),
        "logprob_ranks": st.booleans(),
    },
)


@given(_fields)
def test_fields_come_out_as_they_went_in(fields: dict[str, Any]) -> None:
    data = extension.encode(fields)
    if not fields:
        assert data is None
        assert extension.from_metadata(()) == {}
    else:
        assert data is not None
        assert extension.from_metadata((("other", "x"), (EXTENSION_KEY, data))) == fields


@given(st.binary(max_size=200))
def test_random_bytes_never_escape_as_another_error(data: bytes) -> None:
    try:
        extension.decode(data)
    except ExtensionError:
        return
    assert msgpack.unpackb(data)["v"] == extension.VERSION


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nope": 1}, ["nope", "cache_salt"]),
        ({"seed": "7"}, ["seed", "integer", "'7'"]),
        ({"seed": 2**63}, ["seed"]),
        ({"priority": True}, ["priority", "integer"]),
        ({"bad_words": ["a", 1]}, ["bad_words", "strings"]),
        ({"allowed_token_ids": [-1]}, ["allowed_token_ids"]),
        ({"lora": {"name": "a", "rank": 3}}, ["lora"]),
        ({"structured_outputs": {"whitespace_pattern": 3}}, ["structured_outputs"]),
        ({"extra_args": {1: 2}}, ["extra_args"]),
        ({"cache_salt": "s", "bad_words": ["word"] * 3000}, ["bad_words", str(extension.MAX_ENCODED_BYTES)]),
        ({"extra_args": {"a": 2**70}}, ["cannot be sent"]),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ExtensionError) as caught:
        extension.encode(fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"seed": 1}),
        msgpack.packb({"v": 2, "seed": 1}),
        msgpack.packb({"v": 1, "seed": "x"}),
        msgpack.packb({"v": 1, "future": 1}),
        msgpack.packb({"v": 1}) + b"\x00",
    ],
)
def test_a_message_that_cannot_be_understood_is_refused(data: bytes) -> None:
    with pytest.raises(ExtensionError):
        extension.decode(data)


def test_text_metadata_under_the_binary_key_is_refused() -> None:
    with pytest.raises(ExtensionError, match="binary"):
        extension.from_metadata(((EXTENSION_KEY, "text"),))


def test_the_encoded_limit_leaves_room_in_the_metadata_limit() -> None:
    assert extension.MAX_ENCODED_BYTES * 4 / 3 + 1024 <= extension.METADATA_LIMIT


def test_features_come_out_as_they_went_in() -> None:
    told = features.read(features.advertise({"max_logprobs": -1}))
    assert told.fields == frozenset(extension.FIELDS)
    assert told.limits == {"max_logprobs": -1}
    assert told.lacking(["seed", "telepathy"]) == ["telepathy"]


def test_a_stock_engine_supports_nothing() -> None:
    assert features.read(None).lacking(["seed"]) == ["seed"]
    assert features.read((("x-npufleet-limits", "a=b,c"), ("x-npufleet-features", b"seed"))) == (
        features.EngineFeatures()
    )
