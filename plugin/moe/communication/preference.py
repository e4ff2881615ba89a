"""The way of communication that a user asks for by name."""

import difflib
from typing import TYPE_CHECKING

from ..placement import OVERLAP, PLACEMENT, RANKS
from .choice import Way

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "moe_communication"
OPTIONS = (OPTION, PLACEMENT, RANKS, OVERLAP)
OF_OTHERS = ("npus",)
"""Keys that the launcher sets and the worker reads (``plugin/worker.py``)."""


def preferred_way(config: "VllmConfig") -> Way | None:
    """What ``additional_config`` asks for as ``moe_communication``: a way by its name, None for ``auto``.

    :raises ValueError: another key, or a way that there is not.
    """
    given = config.additional_config
    if not isinstance(given, dict):
        return None
    for key in given:
        if key not in (*OPTIONS, *OF_OTHERS):
            near = difflib.get_close_matches(str(key), OPTIONS, n=1, cutoff=0.0)
            raise ValueError(f"additional_config has no {key!r}; there is {near[0]!r}")
    name = given.get(OPTION, "auto")
    names = {way.value: way for way in Way}
    if name != "auto" and name not in names:
        raise ValueError(f"{OPTION} is {name!r}; allowed are 'auto', {', '.join(map(repr, names))}")
    return names.get(name)
