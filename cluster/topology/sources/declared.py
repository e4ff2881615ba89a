"""A file that declares what a node has, for what no tool tells: racks, networks, super-pods, wiring.

::

    soc: Ascend910_9391
    npus: 0-15            # indices: 0-3_6 is 0, 1, 2, 3, 6
    unhealthy: "5"
    hccs: [0-7, 8-15]     # groups joined by HCCS
    packages: [0-1, 2-3]  # die pairs
    super_pod: "0"
    network: roce-a
    failure_domain: rack-7
    hbm_mib: 65536
    address: 10.0.0.3
    interface: eth0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import checks, yaml_text
from ..facts import Facts
from ..labels import parse_ranges

KEYS = (
    "soc", "npus", "unhealthy", "hccs", "packages", "super_pod", "network", "failure_domain", "hbm_mib",
    "address", "interface",
)  # fmt: skip
_TEXTS = ("soc", "super_pod", "network", "failure_domain", "address", "interface")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One such file."""

    path: Path

    def look(self) -> Facts:
        """Return what the file declares.

        Raises:
            ValueError: naming the file, the key, what was given and what is allowed.
        """
        return facts_of(yaml_text.read(self.path), str(self.path))


def facts_of(data: object, where: str) -> Facts:
    """Return the facts that plain data declares. Raises ``ValueError`` as :meth:`Declared.look`."""
    given = checks.mapping(data, where, KEYS)
    texts: dict[str, Any] = {}
    for name in _TEXTS:
        if given.get(name) is not None:
            number = isinstance(given[name], int) and not isinstance(given[name], bool)
            texts[name] = checks.text(str(given[name]) if number else given[name], f"{where}: {name}")
    size = given.get("hbm_mib")
    return Facts(
        indices=_with(given, "npus", where, _indices),
        unhealthy=_with(given, "unhealthy", where, _indices),
        domains=_with(given, "hccs", where, _groups),
        packages=_with(given, "packages", where, _groups),
        hbm_mib=None if size is None else checks.integer(size, f"{where}: hbm_mib", 1, 1 << 24),
        **texts,
    )


def _with(given: dict[str, Any], key: str, where: str, read: Callable[[Any], Any]) -> Any:
    if given.get(key) is None:
        return None
    try:
        return read(given[key])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {key} is {checks.shown(given[key])}: {error}") from error


def _indices(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(sorted(index for item in value for index in _indices(item)))
    return parse_ranges(str(value))


def _groups(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise TypeError("expected a list of groups such as [0-7, 8-15]")
    return tuple(_indices(item) for item in value)
