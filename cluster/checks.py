"""Checks for values that come from outside: each failure names what was given and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+ -]{0,127}")


def unknown_key(key: object, allowed: Iterable[str], where: str) -> ValueError:
    """Return the error for a key that nobody knows, with the nearest known one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"
    return ValueError(f"{where}: unknown key {key!r}{hint}")


def mapping(value: object, where: str, allowed: Iterable[str]) -> dict[str, Any]:
    """Return ``value`` as a dict whose keys are all ``allowed``.

    Raises:
        ValueError: if it is not a mapping or has an unknown key.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__} {value!r}")
    names = set(allowed)
    for key in value:
        if key not in names:
            raise unknown_key(key, names, where)
    return dict(value)


def text(value: object, where: str) -> str:
    """Return ``value`` if it is a non-empty string, else raise ``ValueError``."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a non-empty text, got {value!r}")
    return value


def optional_text(value: object, where: str) -> str | None:
    """Return None for None, else as :func:`text`."""
    return None if value is None else text(value, where)


def name(value: object, where: str) -> str:
    """Return ``value`` if it can name a fleet or a model deployment, else raise ``ValueError``.

    Names stand in URLs, headers, metric labels, log lines and the names of Ray's actors.
    """
    made = text(value, where)
    if not _NAME.fullmatch(made):
        raise ValueError(
            f"{where}: expected letters, digits and any of . _ - / : @ + or spaces, 128 at most and a letter or "
            f"digit first, got {made[:200]!r}"
        )
    return made


def path(value: object, where: str) -> str:
    """Return ``value`` if it can be the path or the name of a checkpoint, else raise ``ValueError``."""
    made = text(value, where)
    if made.startswith("-") or any(not character.isprintable() for character in made):
        raise ValueError(f"{where}: expected the folder of a checkpoint, got {made[:200]!r}")
    return made


def integer(value: object, where: str, low: int, high: int) -> int:
    """Return ``value`` if it is an integer in [low, high], else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where}: expected an integer from {low} to {high}, got {value!r}")
    return value


def number(value: object, where: str, low: float, high: float) -> float:
    """Return ``value`` as a float if it is a number in [low, high], else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{where}: expected a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def port(value: object, where: str) -> int:
    """Return ``value`` if it is a TCP port; 0 lets the system choose. Raises ``ValueError`` otherwise."""
    return integer(value, where, 0, 65535)


def choice(value: object, where: str, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``, else raise ``ValueError``."""
    names = sorted(allowed)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: expected one of {', '.join(names)}, got {value!r}{hint}")
    return str(value)


def flag(value: object, where: str) -> bool:
    """Return ``value`` if it is true or false, else raise ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}: expected true or false, got {value!r}")
    return value
