"""Emptying nodes: which engine leaves next, and which model needs one more elsewhere before.

An engine on a cordoned node finishes its answers and ends, and Serve starts another one, which is placed elsewhere.
At most one engine of a model leaves at a time, and none before another one is ready to take its requests, if there is
room for one.

A node that Ray is about to take away (``ray drain-node``, the autoscaler) is emptied like one that a user named.
Engines whose own process sits there are left to Serve, which starts another one and ends them; it does not see workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..endpoints import EngineEndpoint, EngineState


@dataclass(frozen=True, kw_only=True)
class Leave:
    """What to do next: engines that leave now, and models that get one engine more (+1) or lose it again (-1)."""

    engines: tuple[str, ...] = ()
    scale: Mapping[str, int] = field(default_factory=dict)


def nodes_of(endpoint: EngineEndpoint) -> set[str]:
    """Return the nodes that an engine needs: those of its workers, and that of its own process."""
    return {npu.rpartition(":")[0] for npu in endpoint.places} | {endpoint.node_id} - {""}


def left_to_serve(endpoints: Iterable[EngineEndpoint], draining: Iterable[str]) -> tuple[EngineEndpoint, ...]:
    """Return the engines that Serve itself moves away from nodes that drain."""
    shut = set(draining)
    return tuple(endpoint for endpoint in endpoints if endpoint.node_id in shut)


def must_move(home: str, cordoned: Iterable[str], nodes: Iterable[str]) -> bool:
    """Say whether an engine that starts had better start on another node than ``home``, because a user empties that
    one. Ray knows nothing of it, and Serve starts processes there as anywhere.

    Args:
        home: id of the node of the engine's process.
        cordoned: ids of the nodes that users empty.
        nodes: ids of all nodes that Ray does not take away.
    """
    shut = set(cordoned)
    return home in shut and bool(set(nodes) - shut)


def step(
    cordoned: Iterable[str],
    endpoints: Iterable[EngineEndpoint],
    wanted: Mapping[str, int],
    lent: Iterable[str],
    room: Mapping[str, int],
    starting: Mapping[str, int],
) -> Leave:
    """Return what to do next.

    Args:
        cordoned: ids of the nodes to empty.
        endpoints: the engines there are.
        wanted: by model, how many engines there shall be, the lent one included.
        lent: models that were given one engine more for a drain.
        room: by model, how many engines find NPUs on other nodes now.
        starting: by model, how many engines start. A loan ends when one starts in place of the engine that has left:
            Serve knows by then that that one is gone, and takes away one that starts before one that answers.
    """
    closed, there = set(cordoned), list(endpoints)
    leave: list[str] = []
    scale: dict[str, int] = {}
    for model, count in wanted.items():
        own = [endpoint for endpoint in there if endpoint.model == model]
        ready = [endpoint for endpoint in own if endpoint.state is EngineState.READY]
        inside = [endpoint for endpoint in ready if nodes_of(endpoint) & closed]
        if not inside:
            if model in lent and len(own) == len(ready) >= count - starting.get(model, 0) and ready:
                scale[model] = -1
        elif len(own) > len(ready) or len(ready) < count:
            continue  # one is leaving, or starting in its stead
        elif len(ready) > len(inside) or count > 1:
            leave.append(inside[0].engine_id)
        elif model not in lent and room.get(model, 0):
            scale[model] = 1
        elif not room.get(model, 0):
            leave.append(inside[0].engine_id)  # nowhere to go: the node is to be empty all the same
    return Leave(engines=tuple(leave), scale=scale)
