"""Why an engine cannot be placed: the rule, what is missing, and the closest layout that would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..topology.model import Node
from .board import Board
from .plan import Bundle, NoRoom, Request, Rule
from .room import illegal, widest

Place = Callable[[Board, Request], "tuple[Bundle, ...] | None"]
SHOWN = 8  # nodes that a message lists


def explain(board: Board, request: Request, place: Place) -> NoRoom:
    """Return the refusal of a request that :func:`~.planner.place` found no room for."""
    empty = Board(board.topology, {node.node_id: node.usable for node in board.topology.nodes})
    never = place(empty, request) is None
    rule, why = _never(empty, request, place) if never else _now(board, request)
    near = closest(empty if never else board, request, place)
    text = f"{wish(request)}, but {why} (rule {rule})"
    if near is not None:
        text += f"; {'it would fit' if never else 'there is room now for it'} {layout(near, request)}"
    return NoRoom(text, never=never, rule=rule, closest=near)


def wish(request: Request) -> str:
    """Return what an engine asks for, in words."""
    size, groups = request.tensor_parallel_size, request.groups
    chip = f" {request.soc}" if request.soc else ""
    if groups == 1:
        return f"an engine of {request.model!r} needs {_npus(size, chip)}{' in one HCCS domain' if size > 1 else ''}"
    return f"an engine of {request.model!r} needs {_npus(request.npus, chip)} in {groups} groups of {size}"


def layout(near: Request, asked: Request) -> str:
    """Return the parallel sizes of ``near`` that differ from those asked for."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    changed = [
        f"{name} {getattr(near, name)}" for name in names if getattr(near, name) != getattr(asked, name)
    ]
    return f"with {' and '.join(changed)}"


def closest(board: Board, request: Request, place: Place) -> Request | None:
    """Return the layout nearest to the one asked for that fits: the most NPUs, then the widest groups."""
    tried = sorted(
        set(_smaller(request)), key=lambda near: (near.npus, near.tensor_parallel_size), reverse=True
    )
    return next((near for near in tried if place(board, near) is not None), None)


def _smaller(request: Request) -> Iterator[Request]:
    size, stages, replicas = (
        request.tensor_parallel_size,
        request.pipeline_parallel_size,
        request.data_parallel_size,
    )
    sizes = [part for part in range(1, size + 1) if size % part == 0]
    counts = [part for part in range(1, replicas + 1) if replicas % part == 0]
    for part in sizes:
        for pipeline in {stages, stages * size // part}:
            for count in counts:
                if (part, pipeline, count) != (size, stages, replicas):
                    yield replace(
                        request,
                        tensor_parallel_size=part,
                        pipeline_parallel_size=pipeline,
                        data_parallel_size=count,
                    )


def _never(empty: Board, request: Request, place: Place) -> tuple[Rule, str]:
    """Why even an idle fleet could not hold it."""
    nodes = [node for node in empty.topology.nodes if node.npus]
    if not nodes:
        return Rule.NPUS, (
            "no node of the Ray cluster offers the resource NPU; start its nodes with "
            "`ray start … $(npufleet node)`"
        )
    chips = Counter[str]()
    for node in nodes:
        chips[node.soc] += node.usable.bit_count()
    if request.soc and request.soc not in chips:
        return Rule.ONE_CHIP, f"the fleet has {_listed(chips)}"
    fitting = [node for node in nodes if not request.soc or node.soc == request.soc]
    size = request.tensor_parallel_size
    if all(illegal(node.shape, size, request.groups) for node in fitting):
        return _illegal(fitting[0], request)
    wide = max(widest(node.shape) for node in fitting)
    if size > wide and place(empty, replace(request, expert_parallel=False)) is None:
        return Rule.HCCS, f"the largest domain holds {wide}"
    most = max(chips[node.soc] for node in fitting)
    if request.npus > most:
        if request.npus <= sum(chips.values()) and len(chips) > 1:
            return Rule.ONE_CHIP, f"no kind of chip has as many: {_listed(chips)}"
        return Rule.NPUS, f"the fleet has {_listed(chips)}: {request.npus - most} are missing"
    if request.expert_parallel and place(empty, replace(request, expert_parallel=False)) is not None:
        fabrics = Counter[str]()
        for node in fitting:
            fabrics[node.fabric] += node.usable.bit_count()
        name, count = fabrics.most_common(1)[0]
        return Rule.SUPER_POD, f"its experts must share one super-pod, and the largest, {name}, holds {count}"
    return Rule.HCCS, f"the domains of {_listed(chips)} do not hold that many groups of {size}"


def _illegal(node: Node, request: Request) -> tuple[Rule, str]:
    if node.shape.packages:
        return Rule.DIE_PAIRS, f"on {node.soc} an engine takes one NPU or an even number, in whole packages"
    return Rule.RINGS, (
        f"on {node.soc} servers of two rings a group of more than {widest(node.shape) // 2} NPUs takes an even "
        "number, half of them in each ring"
    )


def _now(board: Board, request: Request) -> tuple[Rule, str]:
    """Why it has to wait: which NPUs are free, and whether there are too few or they lie apart."""
    free = {
        node.node_id: board.free(node.node_id).bit_count()
        for node in board.topology.nodes
        if node.npus and (not request.soc or node.soc == request.soc)
    }
    shown = [
        f"{board.nodes[node_id].title} {count} of {board.nodes[node_id].npus}"
        for node_id, count in free.items()
    ]
    more = f" and {len(shown) - SHOWN} more nodes" if len(shown) > SHOWN else ""
    listed = f"free are: {', '.join(shown[:SHOWN])}{more}"
    missing = request.npus - sum(free.values())
    if missing > 0:
        return Rule.NPUS, f"{listed}: {missing} are missing"
    if request.tensor_parallel_size > 1 or not any(node.shape.packages for node in board.topology.nodes):
        return Rule.HCCS, f"{listed}, not close enough together"
    return Rule.DIE_PAIRS, f"{listed}, not in whole packages"


def _listed(chips: Counter[str]) -> str:
    return " and ".join(f"{count} healthy {soc or 'NPU'}" for soc, count in chips.items())


def _npus(count: int, chip: str) -> str:
    return f"{count}{chip or ' NPU'}{'s' if count > 1 and not chip else ''}"
