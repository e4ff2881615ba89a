"""What a change of the fleet means: a pure function from the present and the wish to steps.

Each step says what will happen, and whether clients notice. Nothing here acts; the controller does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..config import FleetConfig, ModelConfig
from ..placement import requests
from .wish import Wish, generation


class Kind(StrEnum):
    """What happens to one part of the fleet."""

    ADD = "add"  # a model deployment begins
    REMOVE = "remove"  # a model deployment ends: its engines drain
    SCALE = "scale"  # more or fewer engines or front ends, the others untouched
    ROLL = "roll"  # engines are replaced by ones of a new generation
    RESTART = "restart"  # controller or front end starts anew on other ports or settings
    SETTINGS = "settings"  # taken over by running processes


@dataclass(frozen=True, kw_only=True)
class Step:
    """One part of a change; ``notice`` says what clients notice, empty for nothing."""

    kind: Kind
    what: str  # model deployment, "front end" or "controller"
    text: str
    notice: str = ""
    surge: int = 0  # engines that start beside the old ones before any of those ends

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": str(self.kind), "what": self.what, "text": self.text, "notice": self.notice}


def steps(present: Wish, wish: Wish, room: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the steps from ``present`` to ``wish``, none if they are equal.

    Args:
        present: what the fleet is to be now.
        wish: what it shall be.
        room: by model deployment of ``wish``, how many engines of it would find NPUs now.

    Raises:
        ValueError: for what no running fleet can change.
    """
    old, new = present.config, wish.config
    _same(old, new)
    found: list[Step] = []
    for model in new.models:
        before = present.model(model.name)
        found += _model(present, wish, before, model, room.get(model.name, 0))
    for model in old.models:
        if wish.model(model.name) is None:
            count = present.engines[model.name]
            text = f"{_engines(count)} take no new request, finish what they answer, and end"
            found.append(Step(kind=Kind.REMOVE, what=model.name, text=text, notice="the model is gone"))
    if (old.router, old.gateway) != (new.router, new.gateway):
        found.append(
            Step(
                kind=Kind.RESTART,
                what="front end",
                text="a router and a gateway with other settings start before those that are there end",
                notice="running requests may end first, then clients must connect again",
            )
        )
    if old.front_ends != new.front_ends:
        text = f"{old.front_ends} -> {new.front_ends}, each a router and a gateway on the same ports"
        found.append(Step(kind=Kind.SCALE, what="front ends", text=text))
    if old.metrics != new.metrics:
        found.append(Step(kind=Kind.RESTART, what="controller", text="it listens on another address"))
    return tuple(found)


def _same(old: FleetConfig, new: FleetConfig) -> None:
    for key in ("name", "device"):
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            raise ValueError(
                f"the fleet's {key} is {before!r}, and no running fleet can change it to {after!r}; "
                f"keep {key}: {before}, or serve another fleet"
            )


def _model(
    present: Wish, wish: Wish, before: ModelConfig | None, model: ModelConfig, room: int
) -> list[Step]:
    count = wish.engines[model.name]
    if before is None:
        text = f"{_engines(count)} of {requests.of(model, '').npus} NPU"
        notice = "" if room >= count else f"only {room} of them find NPUs now, the others wait"
        return [Step(kind=Kind.ADD, what=model.name, text=text, notice=notice)]
    had = present.engines[model.name]
    found: list[Step] = []
    if generation(present.config, before) != generation(wish.config, model):
        found.append(_roll(model, min(had, count), room, changes(before, model)))
    elif dict(before.engine) != dict(model.engine):
        text = f"the gateway takes over {changes(before, model)}"
        found.append(Step(kind=Kind.SETTINGS, what=model.name, text=text))
    if had != count:
        text = f"{had} -> {_engines(count)}"
        notice = ""
        if count - had > room and not found:
            notice = f"only {room} of {count - had} more find NPUs now, the others wait"
        elif count == 0:
            notice = "requests are refused until an engine is back"
        found.append(Step(kind=Kind.SCALE, what=model.name, text=text, notice=notice))
    return found


def _roll(model: ModelConfig, count: int, room: int, what: str) -> Step:
    surge = min(room, count)
    if surge:
        how = f"{surge} at a time start beside the old ones, which drain when the new are ready"
        return Step(kind=Kind.ROLL, what=model.name, text=f"{what}: {how}", surge=surge)
    how = "no NPU is free, so one at a time drains and then starts anew"
    if count > 1:
        notice = f"{count - 1} of {count} engines answer meanwhile"
    else:
        notice = "it is the only engine: requests are refused until it is back"
    return Step(kind=Kind.ROLL, what=model.name, text=f"{what}: {how}", notice=notice)


def changes(before: ModelConfig, after: ModelConfig) -> str:
    """Return in words which settings of a model deployment differ."""
    told = []
    if before.source != after.source:
        told.append(f"source {before.source} -> {after.source}")
    for name in sorted({*before.engine, *after.engine}):
        old, new = before.engine.get(name, "unset"), after.engine.get(name, "unset")
        if old != new:
            told.append(f"{name} {old} -> {new}")
    return ", ".join(told) or "settings"


def render(found: tuple[Step, ...] | list[Step]) -> str:
    """Return the steps as text, one a line."""
    if not found:
        return "nothing changes"
    return "\n".join(line(step.to_dict()) for step in found)


def line(step: Mapping[str, Any]) -> str:
    """Return one step, as :meth:`Step.to_dict` gives it, as text."""
    notice = f"\n           ! {step['notice']}" if step["notice"] else ""
    return f"  {step['kind']:<8} {step['what']}: {step['text']}{notice}"


def change_line(change: Mapping[str, Any]) -> str:
    """Return how far a change is, from :meth:`Change.to_dict`."""
    return f"{change['state']}: {change['detail']}" if change["detail"] else str(change["state"])


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
