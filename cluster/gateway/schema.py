"""JSON schemas that no text can satisfy, found before an engine is asked.

The grammar of a schema that refers to nothing but itself (``{"$ref": "#"}``) is accepted by the structured-output
backend, and then allows no token at all: the engine ends such a request with a fault instead of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Pointer = str  # JSON pointer in URI form: "#", "#/properties/a"


def endless_reference(schema: Any) -> Pointer | None:
    """Return where a schema leads back to itself without describing any text; None where nothing does.

    A reference is endless if following references, every alternative of an ``anyOf`` or ``oneOf``, or one
    part of an ``allOf`` comes back to it before anything else is said. ``schema`` is a decoded JSON schema
    or its text; text that is no JSON is left to whoever compiles it.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return None
    return next((at for at, node in _nodes(schema) if "$ref" in node and _endless(schema, node)), None)


def _nodes(schema: Any) -> Iterator[tuple[Pointer, Mapping[str, Any]]]:
    """Every mapping in ``schema`` with its pointer, outermost first."""
    waiting: list[tuple[Pointer, Any]] = [("#", schema)]
    while waiting:
        at, node = waiting.pop(0)
        if isinstance(node, Mapping):
            yield at, node
            waiting += [(f"{at}/{_escape(str(key))}", value) for key, value in node.items()]
        elif isinstance(node, list):
            waiting += [(f"{at}/{index}", value) for index, value in enumerate(node)]


def _endless(schema: Any, node: Any, seen: frozenset[int] = frozenset()) -> bool:
    if not isinstance(node, Mapping):
        return False
    if id(node) in seen:
        return True
    seen |= {id(node)}
    if isinstance(reference := node.get("$ref"), str):
        return _endless(schema, _resolve(schema, reference), seen)
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := node.get(name), list) and branches:
            return all(_endless(schema, branch, seen) for branch in branches)
    if isinstance(parts := node.get("allOf"), list):
        return any(_endless(schema, part, seen) for part in parts)
    return False


def _resolve(schema: Any, reference: Pointer) -> Any:
    """What a reference inside ``schema`` names; None where it names nothing there."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(key)
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
