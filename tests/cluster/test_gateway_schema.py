"""Schemas that lead back to themselves before they say anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npufleet.cluster.gateway.schema import endless_reference

LOOP = {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}}


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"$ref": "#"}, "#"),
        (json.dumps({"$ref": "#"}), "#"),
        (LOOP, "#/properties/a"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "#/anyOf/0"),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "#/allOf/1"),
        ({"type": "array", "items": {"$ref": "#/items"}}, "#/items"),
        ({"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "type": "object"}, "#/$defs/a~1b"),
    ],
)
def test_an_endless_reference_is_found(schema: Any, at: str) -> None:
    assert endless_reference(schema) == at


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}},
        {"$ref": "#/$defs/absent"},
        {"$ref": "elsewhere.json"},
        {"properties": {"$ref": {"type": "string"}}},
        "no JSON",
        True,
    ],
)
def test_any_other_is_left_to_the_backend(schema: Any) -> None:
    assert endless_reference(schema) is None
