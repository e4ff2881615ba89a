"""Checks for values that come from outside: each failure names what was given and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+ -]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_SHOWN = 200  # characters of a wrong value that an error repeats
_LISTED = 40  # known keys that an error lists


def shown(value: object) -> str:
    """Return ``value`` as an error repeats it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def unknown_key(key: object, allowed: Iterable[str], where: str) -> ValueError:
    """Return the error for a key that nobody knows, with the nearest known one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if not near and len(names) <= _LISTED:
        hint = f"; known are {', '.join(names)}"
    return ValueError(f"{where}: unknown key {shown(key)}{hint}")


def mapping(value: object, where: str, allowed: Iterable[str]) -> dict[str, Any]:
    """Return ``value`` as a dict whose keys are all ``allowed``.

    Raises:
        ValueError: if it is not a mapping or has an unknown key.
    """
    if not isinstance(value, Mapping):
        given = "nothing" if value is None else f"{type(value).__name__} {shown(value)}"
        raise ValueError(f"{where}: expected a mapping, got {given}")
    names = set(allowed)
    for key in value:
        if key not in names:
            raise unknown_key(key, names, where)
    return dict(value)


def text(value: object, where: str) -> str:
    """Return ``value`` if it is a non-empty string, else raise ``ValueError``."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a non-empty text, got {shown(value)}")
    return value


def name(value: object, where: str) -> str:
    """Return ``value`` if it can name a fleet or a model deployment, else raise ``ValueError``.

    Names stand in URLs, headers, metric labels, log lines and the names of Ray's actors.
    """
    made = text(value, where)
    if not _NAME.fullmatch(made):
        raise ValueError(
            f"{where}: expected letters, digits and any of . _ - / : @ + or spaces, 128 at most and a letter or "
            f"digit first, got {shown(made)}"
        )
    return made


def path(value: object, where: str) -> str:
    """Return ``value`` if it can be the path or the name of a checkpoint, else raise ``ValueError``."""
    made = text(value, where)
    if made.startswith("-") or any(not character.isprintable() for character in made):
        raise ValueError(f"{where}: expected the folder of a checkpoint, got {shown(made)}")
    return made


def file(value: object, where: str) -> str:
    """Return ``value`` if it can be the path of a file, else raise ``ValueError``."""
    made = text(value, where)
    if any(not character.isprintable() for character in made):
        raise ValueError(f"{where}: expected the path of a file, got {shown(made)}")
    return made


def optional_file(value: object, where: str) -> str | None:
    """Return None for None, else as :func:`file`."""
    return None if value is None else file(value, where)


def host(value: object, where: str) -> str:
    """Return ``value`` if it can be the name or the address of a host, else raise ``ValueError``."""
    made = text(value, where)
    if not _HOST.fullmatch(made):
        raise ValueError(
            f"{where}: expected an address such as 127.0.0.1 or ::1, or the name of a host, got {shown(made)}"
        )
    return made


def server(value: object, where: str, example: str = "http://HOST:PORT") -> str:
    """Return ``value`` if it is the URL of a server that speaks HTTP; ``ValueError`` otherwise."""
    made = text(value, where)
    try:
        parts = urlsplit(made)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good or not made.isascii() or not made.isprintable():
        raise ValueError(f"{where}: expected {example}, got {shown(made)}")
    return made


def collector(value: object, where: str) -> str | None:
    """Return None for None, else ``value`` if it is the URL of a collector of traces; ``ValueError`` otherwise."""
    return None if value is None else server(value, where, "http://HOST:4317")


def address(value: object, where: str) -> str:
    """Return ``value`` if it is HOST:PORT, an IPv6 host in brackets; ``ValueError`` otherwise."""
    name, _, number = text(value, where).rpartition(":")
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    good = _HOST.fullmatch(bare) is not None and (":" in bare) == (bare != name)
    if not good or not number.isascii() or not number.isdigit() or int(number) > 65535:
        raise ValueError(f"{where}: expected HOST:PORT, got {shown(value)}")
    return str(value)


def integer(value: object, where: str, low: int, high: int) -> int:
    """Return ``value`` if it is an integer in [low, high], else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where}: expected an integer from {low} to {high}, got {shown(value)}")
    return value


def number(value: object, where: str, low: float, high: float) -> float:
    """Return ``value`` as a float if it is a number in [low, high], else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{where}: expected a number from {low:g} to {high:g}, got {shown(value)}")
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
        raise ValueError(f"{where}: expected one of {', '.join(names)}, got {shown(value)}{hint}")
    return str(value)


def flag(value: object, where: str) -> bool:
    """Return ``value`` if it is true or false, else raise ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}: expected true or false, got {shown(value)}")
    return value
