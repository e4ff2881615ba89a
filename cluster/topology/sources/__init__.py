"""Where facts about the node of this process come from, the most trusted first."""

from __future__ import annotations

from importlib import import_module

from ..facts import Facts, merge
from .base import Source

ORDER = ("environment", "npu_smi", "device_files")
"""Modules of this package with a class ``Here``; a declared file, where one is given, comes before them."""


def here(declared: Source | None = None, *, virtual: bool | None = None) -> Facts:
    """Return what this machine's sources say together.

    Args:
        declared: a file that the user gave.
        virtual: whether the NPUs are virtual ones; asked of the environment if None.

    Raises:
        ValueError: if a source finds something that it cannot make sense of.
    """
    found: list[Source] = [declared] if declared else []
    for name in ORDER:
        settings = {"virtual": virtual} if name == "environment" else {}
        found.append(import_module(f"{__name__}.{name}").Here(**settings))
    return merge(*(source.look() for source in found))
