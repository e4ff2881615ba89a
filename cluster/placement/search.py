"""Makes a set of plans cheaper: takes a few engines away and places them anew, and keeps what is better.

Placing one engine after the other is blind for what comes later. Here a neighbourhood (the engines of a node or
two, of a model, or a few at random) is cleared and filled again in another order, sometimes with a node shut, so
that it can become empty. The draws are seeded and the effort is counted, not timed: the same state gives the same
plans on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .board import Board
from .plan import Bundle, Placed, Request, placed_as, weight

Place = Callable[[Board, Request], "tuple[Bundle, ...] | None"]
Value = tuple[tuple[int, int], ...]

LOOKS = 60_000
"""Effort: how many nodes may be looked at, all tries together."""
ROUNDS = 400


def improve(
    board: Board, wanted: Sequence[Request], sitting: dict[str, Placed], place: Place, looks: int = LOOKS
) -> None:
    """Make the plans in ``sitting`` cheaper, and place engines that found no room, as far as the effort goes.

    Nothing gets worse: an engine of higher priority is never given up for others, and no engine for a lower cost.

    Args:
        board: the fleet with all engines of ``sitting`` on it; kept in step with them.
        wanted: the engines that may be moved.
        sitting: those that sit, by engine id; changed in place.
        place: finds the cheapest place of one engine.
        looks: the effort.
    """
    if len(wanted) < 2:  # the cheapest place of one engine is known
        return
    draw = random.Random(0)
    by_id = {request.engine_id: request for request in wanted}
    for _ in range(ROUNDS):
        moved, shut = _neighbourhood(draw, board, by_id, sitting)
        looks -= len(moved) * len(board.kinds)
        if looks < 0 or not moved:
            return
        before = _value(board, wanted, sitting)
        old = {name: sitting[name] for name in moved if name in sitting}
        for engine in old.values():
            board.give_back(engine)
            del sitting[engine.engine_id]
        _fill(draw, board, [by_id[name] for name in moved], sitting, place, shut)
        if _value(board, wanted, sitting) > before:
            for name in moved:
                if name in sitting:
                    board.give_back(sitting.pop(name))
            for engine in old.values():
                board.take(engine)
            sitting |= old


def _neighbourhood(
    draw: random.Random, board: Board, by_id: dict[str, Request], sitting: dict[str, Placed]
) -> tuple[list[str], str]:
    """Engines to move, among them all that found no room, and a node to shut meanwhile (none if empty)."""
    used = sorted({b.node_id for name in by_id if name in sitting for b in sitting[name].bundles})
    waiting = [name for name in by_id if name not in sitting]
    kind = draw.randrange(4)
    if kind == 0 or not used:
        some = draw.sample(sorted(by_id), min(3, len(by_id)))
        return list(dict.fromkeys([*some, *waiting])), ""
    if kind == 1:
        model = by_id[draw.choice(sorted(by_id))].model
        alike = [name for name, request in by_id.items() if request.model == model]
        return list(dict.fromkeys([*alike, *waiting])), ""
    cleared = draw.sample(used, min(kind - 1, len(used)))
    there = [
        name
        for name in by_id
        if name in sitting and any(bundle.node_id in cleared for bundle in sitting[name].bundles)
    ]
    return list(dict.fromkeys([*there, *waiting])), draw.choice([cleared[0], ""])


def _fill(
    draw: random.Random,
    board: Board,
    requests: list[Request],
    sitting: dict[str, Placed],
    place: Place,
    shut: str,
) -> None:
    if draw.random() < 0.5:
        draw.shuffle(requests)
        requests.sort(key=lambda request: request.priority, reverse=True)
    else:
        requests.sort(key=weight, reverse=True)
    for node_id in (shut, "") if shut else ("",):
        kind = board.close(node_id) if node_id else None
        for request in requests:
            if request.engine_id not in sitting and (bundles := place(board, request)):
                sitting[request.engine_id] = placed_as(request, bundles)
                board.take(sitting[request.engine_id])
        if kind is not None:
            board.reopen(node_id, kind)


def _value(board: Board, wanted: Sequence[Request], sitting: dict[str, Placed]) -> tuple[Value, int]:
    """What is to be small: NPUs of engines without room, those of the highest priority first, then the cost."""
    waiting: dict[int, int] = {request.priority: 0 for request in wanted}
    for request in wanted:
        if request.engine_id not in sitting:
            waiting[request.priority] += request.npus
    return tuple(sorted(((-priority, npus) for priority, npus in waiting.items()))), board.spent
