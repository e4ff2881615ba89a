"""Which values vLLM's ``EngineArgs`` take, read from their source without importing it: types, words, bounds.

vLLM checks them itself when an engine starts; here a fleet learns of a wrong one before anything does. What is not a
plain type, a list of words or a number between bounds is left to vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .. import checks

ARGUMENTS = (
    ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
    ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs",)),
)
"""Files of vLLM and the classes in them whose fields are arguments of an engine or of its frontend."""

_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
_BOUNDED = ("SchedulerConfig", "CacheConfig", "ModelConfig", "ParallelConfig")
_SAID = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What one argument takes, besides None for vLLM's default."""

    types: frozenset[type] = frozenset()
    words: frozenset[str] = frozenset()
    bounds: tuple[tuple[str, float], ...] = ()  # of a number: pydantic's names and limits

    def check(self, value: Any, where: str) -> None:
        """Raise ``ValueError`` for a value that vLLM would refuse."""
        if self.words and str not in self.types:
            checks.choice(value, where, self.words)
            return
        kinds = self.types | ({int} if float in self.types else set()) | ({str} if self.words else set())
        if type(value) not in kinds:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"{where}: expected {names}, got {checks.shown(value)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if math.isnan(value) or any(not _holds(name, value, limit) for name, limit in self.bounds):
            said = " and ".join(f"{_SAID[name]} {limit:g}" for name, limit in self.bounds) or "a number"
            raise ValueError(f"{where}: expected {said}, got {checks.shown(value)}")


def check(given: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` for the first of vLLM's arguments ``given`` whose value vLLM would refuse."""
    for name, value in given.items():
        allowed = of(name) if value is not None else None
        if allowed is not None:
            allowed.check(value, f"{where}.{name}")


@cache
def of(name: str) -> Allowed | None:
    """What the argument takes; None where only vLLM itself can tell."""
    field = next(
        (item for file, classes in ARGUMENTS for item in _fields(file, classes) if _is(item, name)), None
    )
    if field is None:
        return None
    types, words = set[type](), set[str]()
    for part in _parts(field.annotation):
        if isinstance(part, ast.Name) and part.id in _PLAIN:
            types.add(_PLAIN[part.id])
        elif (found := _words(part)) is not None:
            words |= found
        elif not (isinstance(part, ast.Constant) and part.value is None):
            return None
    return Allowed(types=frozenset(types), words=frozenset(words), bounds=_bounds(name, field.value))


def _holds(name: str, value: float, limit: float) -> bool:
    return {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[name]


def _parts(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        yield from _parts(annotation.left)
        yield from _parts(annotation.right)
    else:
        yield annotation


def _words(part: ast.expr) -> set[str] | None:
    """The words of ``Literal[…]`` or of a name for one; None for anything else."""
    if isinstance(part, ast.Name):
        alias = _alias(part.id)
        return None if alias is None else _words(alias)
    if not (
        isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == "Literal"
    ):
        return None
    found = set[str]()
    for item in part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.add(item.value)
        elif (more := _words(item)) is not None:
            found |= more
        else:
            return None
    return found


def _bounds(name: str, default: ast.expr | None) -> tuple[tuple[str, float], ...]:
    """The bounds that the configuration class gives which the argument goes to."""
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        places = [(default.value.id, default.attr)]
    else:
        places = [(owner, name) for owner in _BOUNDED]
    for owner, attribute in places:
        for item in _class(owner):
            if _is(item, attribute) and isinstance(item.value, ast.Call):
                return tuple(
                    (word.arg, ast.literal_eval(word.value))
                    for word in item.value.keywords
                    if word.arg in _SAID
                )
    return ()


def _is(item: ast.AnnAssign, name: str) -> bool:
    return isinstance(item.target, ast.Name) and item.target.id == name


@cache
def _fields(file: str, classes: tuple[str, ...]) -> tuple[ast.AnnAssign, ...]:
    return tuple(
        item
        for node in _tree(source() / file).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign)
    )


def _class(name: str) -> tuple[ast.AnnAssign, ...]:
    for file in _configs(f"class {name}"):
        if found := _fields(str(file.relative_to(source())), (name,)):
            return found
    return ()


def _alias(name: str) -> ast.expr | None:
    for file in _configs(f"\n{name} ="):
        for node in _tree(file).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == name
            ):
                return node.value
    return None


def _configs(holding: str) -> Iterator[Path]:
    return (file for file, text in _texts().items() if holding in text)


@cache
def _texts() -> dict[Path, str]:
    return {file: file.read_text(encoding="utf-8") for file in sorted((source() / "config").glob("*.py"))}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def source() -> Path:
    """The folder of vLLM's source. Raises ``ValueError`` if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vllm is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0])


def names(file: str, classes: tuple[str, ...]) -> frozenset[str]:
    """The names of the fields of ``classes`` in a file of vLLM."""
    return frozenset(item.target.id for item in _fields(file, classes) if isinstance(item.target, ast.Name))
