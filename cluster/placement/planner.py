"""Where an engine's ranks sit: pure functions from a fleet, its free NPUs and a request to a plan.

The search is greedy. Rules (:class:`~.plan.Rule`) are kept by construction; among what they allow, the cheapest
by :mod:`~.cost` is taken: one node if one can hold the engine, else the fewest, and the fullest that fit, so that
large holes stay for large engines. Equal ones are taken in the order of their ids, so that the same state gives
the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..topology.model import Node, Topology, indices_of
from . import cost, refusal, search
from .board import Board, Kind
from .plan import Bundle, NoRoom, Placed, Plan, Request, placed_as, weight
from .room import Groups, groups, illegal, widest

Share = tuple[Node, int]
"""A node and how many tensor-parallel groups it gets."""


def plan(
    topology: Topology,
    free: Mapping[str, int],
    request: Request,
    engines: Iterable[Placed] = (),
    *,
    preempt: bool = False,
) -> Plan:
    """Place one engine.

    Args:
        topology: the nodes of the fleet.
        free: masks of free NPUs by node id; a node that is absent has none.
        request: what the engine needs.
        engines: those that sit already.
        preempt: whether engines of lower priority may be ended for this one where there is no room else.

    Raises:
        NoRoom: if there is no room now, or there could never be any; the message says what is missing.
    """
    placed = tuple(engines)
    board = Board(topology, free, placed)
    bundles = place(board, request)
    if bundles is not None:
        return Plan(engine_id=request.engine_id, bundles=bundles)
    if preempt and (found := _preempting(board, request, placed)):
        return found
    raise refusal.explain(board, request, place)


def plan_all(
    topology: Topology,
    free: Mapping[str, int],
    requests: Iterable[Request],
    engines: Iterable[Placed] = (),
    *,
    looks: int = search.LOOKS,
) -> dict[str, Plan | NoRoom]:
    """Place engines together, so that small ones leave room for large ones; return a plan or a refusal for each.

    Those of higher priority come first, then those with the larger tensor-parallel groups, then the larger ones.
    What that costs is then improved with the effort ``looks``; see :mod:`~.search`.
    """
    board = Board(topology, free, engines)
    wanted = sorted(requests, key=weight, reverse=True)
    sitting: dict[str, Placed] = {}
    for request in wanted:
        if bundles := place(board, request):
            board.take(sitting.setdefault(request.engine_id, placed_as(request, bundles)))
    search.improve(board, wanted, sitting, place, looks)
    return {
        request.engine_id: Plan(engine_id=request.engine_id, bundles=sitting[request.engine_id].bundles)
        if request.engine_id in sitting
        else refusal.explain(board, request, place)
        for request in wanted
    }


def place(board: Board, request: Request) -> tuple[Bundle, ...] | None:
    """Return the bundles of an engine on the free NPUs of the board, None if there is no room."""
    best: tuple[tuple[int, ...], str, _Area, list[Share]] | None = None
    for nodes, extra in _areas(board, request):
        area = _Area.of(board, request, nodes)
        shares = area.shares()
        if shares is None:
            continue
        key = (extra + area.price(shares), sum(area.left(share) for share in shares))
        if best is None or (key, shares[0][0].node_id) < best[:2]:
            best = key, shares[0][0].node_id, area, shares
    return None if best is None else best[2].bundles(best[3])


def _areas(board: Board, request: Request) -> Iterator[tuple[list[Node], int]]:
    """The sets of nodes that an engine may sit in, with what each costs.

    One chip throughout. One fabric throughout, because there collectives run at full speed; engines without
    expert parallelism that fit into no single one may cross fabrics, which costs as much as a node more.
    """
    for soc, fabrics in board.by_chip.items():
        if request.soc and soc != request.soc:
            continue
        for fabric, nodes in fabrics.items():
            yield nodes, board.apart(request, fabric)
        all_ = [node for nodes in fabrics.values() for node in nodes]
        narrow = request.tensor_parallel_size <= board.widest[soc]
        if len(fabrics) > 1 and request.groups > 1 and narrow and not request.expert_parallel:
            yield all_, cost.SPAN + cost.APART


@dataclass(frozen=True, kw_only=True)
class _Area:
    """Looks for the cheapest place of one engine among nodes of one chip."""

    board: Board
    request: Request
    nodes: Sequence[Node]
    size: int  # NPUs of a group, as one node holds it
    count: int  # groups of the engine
    block: int  # groups that should share a node: the stages of a pipeline

    @classmethod
    def of(cls, board: Board, request: Request, nodes: Sequence[Node]) -> _Area:
        """A group that is wider than a node of a super-pod takes whole nodes, each of which is a group here."""
        size, count = request.tensor_parallel_size, request.groups
        block = request.pipeline_parallel_size
        shape = nodes[0].shape
        if nodes[0].super_pod and size > widest(shape) and size % nodes[0].npus == 0:
            parts = size // nodes[0].npus
            return cls(
                board=board, request=request, nodes=nodes, size=nodes[0].npus, count=count * parts, block=1
            )
        return cls(board=board, request=request, nodes=nodes, size=size, count=count, block=block)

    @property
    def alone(self) -> bool:
        return self.size == self.count == 1

    def shares(self) -> list[Share] | None:
        """The nodes with their numbers of groups; None if there is not enough room."""
        if illegal(self.nodes[0].shape, self.size, self.count):
            return None
        rooms = self._rooms()
        one = [entry for entry in rooms if entry[0] >= self.count]
        if one:
            return [(self._cheapest(one, self.count), self.count)]
        for block in dict.fromkeys((self.block, 1)):
            found = self._several(rooms, block)
            if found is not None:
                return found
        return None

    def _rooms(self) -> list[tuple[int, Node]]:
        known: dict[Kind, int] = {}
        found = []
        for node in self.nodes:
            kind = self.board.kinds[node.node_id]
            room = known.get(kind)
            if room is None:
                room = known[kind] = self.board.room(kind, self.size, self.alone)
            if room:
                found.append((room, node))
        return found

    def _cheapest(self, rooms: Iterable[tuple[int, Node]], count: int) -> Node:
        """The node on which ``count`` groups cost least; among equal ones the fullest, then the first."""
        board, crowd = self.board, self.board.crowd
        mine = self.request.kin
        known: dict[Kind, tuple[int, int]] = {}
        best, chosen = (1 << 60, 0), None
        for _, node in rooms:
            kind = board.kinds[node.node_id]
            entry = known.get(kind)
            if entry is None:
                entry = known[kind] = board.price(kind, self.size, count, self.alone), kind[1].bit_count()
            if entry >= best:
                continue  # being crowded only adds to it
            if crowd.get((*mine, board.racks[node.node_id])):
                entry = entry[0] + cost.CROWDED, entry[1]
                if entry >= best:
                    continue
            best, chosen = entry, node
        assert chosen is not None
        return chosen

    def _several(self, rooms: list[tuple[int, Node]], block: int) -> list[Share] | None:
        """The roomiest nodes until one can hold the rest; of those the cheapest."""
        paired = self.size == 1 and bool(self.nodes[0].shape.packages)
        even = math.lcm(block, 2) if paired else block
        open_: dict[int, list[tuple[int, Node]]] = {}
        for room, node in rooms:
            open_.setdefault(room - room % even, []).append((room, node))
        open_.pop(0, None)
        if sum(room * len(entries) for room, entries in open_.items()) < self.count:
            return None
        left, shares = self.count, []
        while left:
            step = min(max(open_), left)
            node = self._cheapest(
                (e for room, entries in open_.items() if room >= step for e in entries), step
            )
            shares.append((node, step))
            left -= step
            for room, entries in list(open_.items()):
                open_[room] = [entry for entry in entries if entry[1] is not node]
                if not open_[room]:
                    del open_[room]
        return shares

    def groups(self, share: Share) -> Groups:
        node, count = share
        free = self.board.free(node.node_id)
        return groups(node.shape, free, self.size, count, self.alone)

    def price(self, shares: Sequence[Share]) -> int:
        """What these shares cost, as :mod:`~.cost` counts it."""
        board = self.board
        racks = {board.racks[node.node_id]: node.node_id for node, _ in shares}
        crowded = sum(board.crowded(self.request, node_id) for node_id in racks.values())
        opened = sum(
            board.price(board.kinds[node.node_id], self.size, count, self.alone) for node, count in shares
        )
        return cost.SPAN * (len(shares) - 1) + crowded + opened

    def left(self, share: Share) -> int:
        """NPUs that stay free on the node of a share."""
        return self.board.free(share[0].node_id).bit_count() - share[1] * self.size

    def bundles(self, shares: Sequence[Share]) -> tuple[Bundle, ...]:
        """The NPUs of these shares in rank order."""
        places = [
            (node.node_id, npu)
            for node, count in shares
            for mask in self.groups((node, count))
            for npu in indices_of(mask)
        ]
        assert len(places) == self.request.npus, (places, self.request)
        return tuple(
            Bundle(rank=rank, node_id=node_id, npu=npu) for rank, (node_id, npu) in enumerate(places)
        )


def _preempting(board: Board, request: Request, placed: tuple[Placed, ...]) -> Plan | None:
    """A plan that ends as few engines of lower priority as a greedy search finds, the least important first."""
    lower = [engine for engine in placed if engine.priority < request.priority]
    lower.sort(key=lambda engine: (engine.priority, len(engine.bundles), engine.engine_id))
    ended: list[Placed] = []
    for engine in lower:
        board.give_back(engine)
        ended.append(engine)
        if place(board, request) is not None:
            break
    else:
        for engine in ended:
            board.take(engine)
        return None
    for engine in reversed(ended[:-1]):  # the last one is needed; keep whom the others are enough without
        board.take(engine)
        if place(board, request) is None:
            board.give_back(engine)
        else:
            ended.remove(engine)
    bundles = place(board, request)
    assert bundles is not None
    return Plan(
        engine_id=request.engine_id,
        bundles=bundles,
        preempts=tuple(engine.engine_id for engine in ended),
    )


def idle(topology: Topology) -> dict[str, int]:
    """Return the healthy NPUs of each node as free, as if no engine ran."""
    return {node.node_id: node.usable for node in topology.nodes}
