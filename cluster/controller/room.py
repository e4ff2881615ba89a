"""What room there is: without NPUs and nodes that are closed to engines, and counted in engines of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..config import ModelConfig
from ..placement import planner, requests
from ..placement.plan import Bundle, NoRoom
from ..placement.ray_state import State

CLOSED = "closed"
"""The name under which closed NPUs count as held."""


def without(state: State, fenced: Iterable[str], cordoned: Iterable[str]) -> State:
    """Return ``state`` with more NPUs held: those in ``fenced`` (NODE_ID:NUMBER) and all of ``cordoned`` nodes and
    of those that Ray takes away.
    """
    shut = {*cordoned, *state.draining}
    numbers: dict[str, set[int]] = {node.node_id: set() for node in state.topology.nodes}
    for npu in fenced:
        node_id, _, number = npu.rpartition(":")
        if node_id in numbers and number.isdigit():
            numbers[node_id].add(int(number))
    for node in state.topology.nodes:
        if node.node_id in shut:
            numbers[node.node_id] |= {npu.index for npu in node.devices}
    closed = tuple(
        Bundle(rank=0, node_id=node_id, npu=number)
        for node_id, found in numbers.items()
        for number in sorted(found)
    )
    return replace(state, groups={**state.groups, CLOSED: closed}) if closed else state


def room(state: State, model: ModelConfig, most: int) -> int:
    """Return how many engines of ``model`` find NPUs that nobody holds, counting up to ``most``."""
    free = state.free()
    for count in range(most):
        try:
            made = planner.plan(state.topology, free, requests.of(model, f"{count}"), ())
        except NoRoom:
            return count
        for bundle in made.bundles:
            assert bundle.npu is not None, bundle
            free[bundle.node_id] &= ~(1 << bundle.npu)
    return most
