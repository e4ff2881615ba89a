"""API keys, and the tenants they belong to.

A key is one line of a key file: the key itself, and after it what its tenant may do::

    sk-plain
    sk-one  tenant=search weight=3 tokens_per_minute=600000
    sk-two  tenant=search
    sk-ops  tenant=operations admin=yes

Keys of one tenant share its weight and rate; the line that gives them counts for all of its keys.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

_LONGEST_KEY = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """Somebody whose requests are counted together."""

    name: str = ""  # "": whoever comes where no keys are set, or a key without a tenant
    weight: float = 1.0  # its share where requests have to wait for each other
    tokens_per_minute: int = 0  # prompt and output tokens; 0: no limit
    admin: bool = False  # may flush caches, profile engines and follow their events


ANYONE = Tenant(admin=True)
"""Everybody, where no keys are set."""


def read_key_file(file: str | Path | None, where: str = "api_keys") -> tuple[str, ...]:
    """The lines of ``file`` that hold keys, for :class:`Keys`; none without a file.

    Raises:
        ValueError: if the file cannot be read, has a line that cannot, or holds no key, since that would leave the
            port open.
    """
    if file is None:
        return ()
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{where}: cannot read {file}: {reason}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{where}: {file} holds no key")
    Keys(lines)  # which counts them as the file does
    return keys


Metadata = Iterable[tuple[str, str | bytes]]


class Keys:
    """Keys as digests, so that a look at the memory or the time of a comparison tells nothing about a key."""

    def __init__(self, lines: Iterable[str]) -> None:
        """``lines`` as in a key file. ValueError naming the line for one that cannot be read."""
        given: dict[str, dict[str, float | int | bool]] = {}
        names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            name, values = _options(words[1:], f"line {number} of the API keys")
            digest = _digest(words[0].encode())
            if digest in names:
                raise ValueError(f"line {number} of the API keys: the key is given twice")
            names[digest] = name
            known = given.setdefault(name, {})
            for key, value in values.items():
                if known.setdefault(key, value) != value:
                    raise ValueError(f"line {number} of the API keys: {name!r} has another {key} already")
        tenants = {name: Tenant(name=name, **values) for name, values in given.items()}  # type: ignore[arg-type]
        self._tenants: Mapping[bytes, Tenant] = {digest: tenants[name] for digest, name in names.items()}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenants(self) -> Sequence[Tenant]:
        """All tenants, by name."""
        return sorted(set(self._tenants.values()), key=lambda tenant: tenant.name)

    def tenant(self, key: bytes) -> Tenant | None:
        """Whose ``key`` it is; None for a wrong one. Without any keys everybody is welcome."""
        if not self._tenants:
            return ANYONE
        return self._tenants.get(_digest(key)) if key and len(key) <= _LONGEST_KEY else None

    def tenant_of(self, metadata: Metadata) -> Tenant | None:
        """Whose request has these headers: ``authorization: Bearer KEY`` or ``x-api-key: KEY``."""
        if not self._tenants:
            return ANYONE
        given = b""
        for name, value in metadata:
            if name not in ("authorization", "x-api-key"):
                continue
            raw = value if isinstance(value, bytes) else value.encode()
            if name == "authorization":
                scheme, _, raw = raw.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            given = raw.strip()
        return self.tenant(given)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _options(words: Sequence[str], where: str) -> tuple[str, dict[str, float | int | bool]]:
    known = ["tenant", *(item.name for item in fields(Tenant) if item.name != "name")]
    name, values, given = "", {}, set[str]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:  # it may be a part of a key, which no error shows
            raise ValueError(f"{where}: after the key come words such as tenant=NAME, of {', '.join(known)}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise ValueError(f"{where}: {key!r} is none of {', '.join(known)}{hint}")
        if key in given:
            raise ValueError(f"{where}: {key} is given twice")
        given.add(key)
        if key == "tenant":
            name = text
        else:
            values[key] = _value(key, text, where)
    if values and not name:
        raise ValueError(f"{where}: {', '.join(values)} belongs to a tenant; add tenant=NAME")
    return name, values


def _value(key: str, text: str, where: str) -> float | int | bool:
    try:
        if key == "admin":
            return {"yes": True, "no": False}[text]
        value = float(text) if key == "weight" else int(text)
    except (ValueError, KeyError):
        value = 0
    if not 0 < value < math.inf:
        allowed = "yes or no" if key == "admin" else "a number above 0"
        raise ValueError(f"{where}: {key} must be {allowed}, got {text!r}")
    return value
