"""Which engines are there for which part of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from npufleet.cluster.endpoints import Role
from npufleet.cluster.router.split.base import Stage

T = TypeVar("T")

_FIRST_CHOICE = {
    Stage.WHOLE: (Role.BOTH, Role.DECODE),
    Stage.PREFILL: (Role.PREFILL,),
    Stage.DECODE: (Role.DECODE, Role.BOTH),
}


def fit_for(stage: Stage, engines: Sequence[T], role_of: Callable[[T], str]) -> list[T]:
    """Those of ``engines`` that ``stage`` of a request may go to.

    Prompts are computed apart on prefill engines alone. Answers come from the others; where none of those is there, a
    prefill engine answers by itself, since any engine can, and a slow answer is better than none.
    """
    fit = [engine for engine in engines if role_of(engine) in _FIRST_CHOICE[stage]]
    return fit or (list(engines) if stage is Stage.WHOLE else [])
