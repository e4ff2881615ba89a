"""Which handoff belongs to a connector."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module

from npufleet.cluster.router.split.base import Handoff

_KINDS = {"store": "SharedStore", "nixl": "Nixl", "mooncake": "Mooncake"}  # module -> class


@cache
def _all() -> tuple[Handoff, ...]:
    package = __name__.rpartition(".")[0]
    return tuple(getattr(import_module(f"{package}.{module}"), name)() for module, name in _KINDS.items())


def known_connectors() -> list[str]:
    """The connectors between whose engines prompts can be split."""
    return sorted(name for handoff in _all() for name in handoff.connectors)


def handoff_of(connector: str) -> Handoff | None:
    """The handoff of vLLM's ``connector``, None where this router knows none."""
    for handoff in _all():
        if any(fnmatchcase(connector, name) for name in handoff.connectors):
            return handoff
    return None
