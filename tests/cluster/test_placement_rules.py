"""The rules of placement, held on random fleets, random wear and random wishes."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet.cluster.endpoints import Role
from npufleet.cluster.placement import cost, planner
from npufleet.cluster.placement.plan import NoRoom, Placed, Plan, Request, placed_as
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.chips import Family
from npufleet.cluster.topology.model import Node, Topology, mask_of

KINDS = tuple(simulated.SERVERS)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Topology, dict[str, int]]:
    """A fleet of up to eight servers with sick NPUs, and what others use of it."""
    nodes = []
    kinds = draw(st.sampled_from([KINDS, KINDS, ("a3",), ("a2", "a2-16")]))
    for i in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(kinds))
        told: dict[str, object] = {
            "failure_domain": draw(st.sampled_from([None, "r0", "r1"])),
            "unhealthy": tuple(draw(st.sets(st.integers(0, 15), max_size=2))),
            "super_pod": draw(st.sampled_from(["0", "1"])) if kind == "a3" else None,
        }
        nodes.append(simulated.server(kind, f"n{i}", **told))
    busy = {node.node_id: draw(st.integers(0, 0xFFFF)) & draw(st.integers(0, 0xFFFF)) for node in nodes}
    if draw(st.booleans()):
        busy = {}
    return Topology(nodes=tuple(nodes)), {
        node.node_id: node.usable & ~busy.get(node.node_id, 0) for node in nodes
    }


@st.composite
def wishes(draw: st.DrawFn) -> list[Request]:
    """Up to ten engines of all layouts, sensible or not."""
    sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 4, 5, 8, 10, 12, 16, 32])
    return [
        Request(
            engine_id=f"e{i}",
            model=draw(st.sampled_from("abc")),
            tensor_parallel_size=draw(sizes),
            pipeline_parallel_size=draw(st.sampled_from([1, 1, 1, 2, 3])),
            data_parallel_size=draw(st.sampled_from([1, 1, 2, 3, 4])),
            expert_parallel=draw(st.booleans()),
            role=draw(st.sampled_from(list(Role))),
            priority=draw(st.integers(-1, 1)),
        )
        for i in range(draw(st.integers(1, 10)))
    ]


def check_group(nodes: dict[str, Node], places: list[tuple[str, int]]) -> None:
    """One tensor-parallel group keeps to one HCCS domain, as each chip's rules have it."""
    homes = {node_id for node_id, _ in places}
    if len(homes) > 1:  # wider than a node: whole nodes of one super-pod
        assert {nodes[n].super_pod for n in homes} != {""} and len({nodes[n].super_pod for n in homes}) == 1
        assert len(places) == sum(nodes[n].npus for n in homes)
        return
    node = nodes[places[0][0]]
    mask = mask_of(npu for _, npu in places)
    touched = [domain for domain in node.shape.domains if domain & mask]
    if len(touched) > 1:  # both rings of a server of 16, evenly and at the same positions
        assert node.shape.rings and len(places) > 8 and mask >> 8 == mask & 0xFF


def check_engine(nodes: dict[str, Node], wish: Request, plan: Plan) -> None:
    assert [bundle.rank for bundle in plan.bundles] == list(range(wish.npus))
    places = [(bundle.node_id, bundle.npu) for bundle in plan.bundles]
    assert len({nodes[node_id].soc for node_id, _ in places}) == 1
    size = wish.tensor_parallel_size
    for start in range(0, wish.npus, size):
        check_group(nodes, places[start : start + size])  # type: ignore[arg-type]
    if wish.expert_parallel:
        assert len({nodes[node_id].fabric for node_id, _ in places}) == 1
    by_node: dict[str, list[int]] = defaultdict(list)
    for node_id, npu in places:
        assert npu is not None
        by_node[node_id].append(npu)
    for node_id, npus in by_node.items():
        node = nodes[node_id]
        if node.shape.family is Family.A3 and wish.npus > 1:
            whole = sum(pair for pair in node.shape.packages if pair & mask_of(npus) == pair)
            assert whole == mask_of(npus), "a die pair is split"


@settings(max_examples=120, deadline=None)
@given(fleets(), wishes(), st.sampled_from([0, 500, 3000]))
def test_plans_keep_the_rules(
    fleet: tuple[Topology, dict[str, int]], wanted: list[Request], looks: int
) -> None:
    topology, free = fleet
    nodes = {node.node_id: node for node in topology.nodes}
    made = planner.plan_all(topology, free, wanted, looks=looks)
    assert made.keys() == {wish.engine_id for wish in wanted}
    left = dict(free)
    for wish in wanted:
        plan = made[wish.engine_id]
        if isinstance(plan, NoRoom):
            continue
        check_engine(nodes, wish, plan)
        for bundle in plan.bundles:
            assert bundle.npu is not None and left[bundle.node_id] >> bundle.npu & 1, (
                "given twice, or never free"
            )
            left[bundle.node_id] &= ~(1 << bundle.npu)
    assert where(planner.plan_all(topology, free, wanted, looks=looks)) == where(made), (
        "the same state, other plans"
    )


def where(made: dict[str, Plan | NoRoom]) -> dict[str, object]:
    return {name: plan.bundles if isinstance(plan, Plan) else plan.rule for name, plan in made.items()}


@settings(max_examples=60, deadline=None)
@given(fleets(), wishes())
def test_a_longer_search_is_never_worse(
    fleet: tuple[Topology, dict[str, int]], wanted: list[Request]
) -> None:
    topology, free = fleet
    busy = {node.node_id: node.usable & ~free[node.node_id] for node in topology.nodes}
    values = []
    for looks in (0, 3000):
        made = planner.plan_all(topology, free, wanted, looks=looks)
        sitting = [placed_as(w, p.bundles) for w in wanted if isinstance(p := made[w.engine_id], Plan)]
        names = {engine.engine_id for engine in sitting}
        waiting = [
            sum(w.npus for w in wanted if w.engine_id not in names and w.priority == priority)
            for priority in (1, 0, -1)
        ]
        values.append((waiting, cost.of(topology, sitting, busy)))
    assert values[1] <= values[0]


@settings(max_examples=150, deadline=None)
@given(fleets(), wishes())
def test_refusals_are_true(fleet: tuple[Topology, dict[str, int]], wanted: list[Request]) -> None:
    """What is refused for ever never fits, what has to wait fits when idle, and the closest layout does fit."""
    topology, free = fleet
    wish = wanted[0]
    try:
        planner.plan(topology, free, wish)
    except NoRoom as refused:
        idle = planner.idle(topology)
        try:
            planner.plan(topology, idle, wish)
            assert not refused.never
        except NoRoom:
            assert refused.never
        assert str(refused.rule) in str(refused)
        if refused.closest is not None:
            planner.plan(topology, idle if refused.never else free, refused.closest)


@settings(max_examples=100, deadline=None)
@given(fleets(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_an_engine_takes_no_more_nodes_than_it_needs(
    fleet: tuple[Topology, dict[str, int]], size: int, groups: int
) -> None:
    topology, free = fleet
    wish = Request(engine_id="e", model="m", tensor_parallel_size=size, data_parallel_size=groups)
    try:
        plan = planner.plan(topology, free, wish)
    except NoRoom:
        return
    if len({bundle.node_id for bundle in plan.bundles}) == 1:
        return
    for node in topology.nodes:
        alone = Topology(nodes=(node,))
        try:
            planner.plan(alone, free, wish)
        except NoRoom:
            continue
        raise AssertionError(f"{node.node_id} could hold the whole engine")


@settings(max_examples=100, deadline=None)
@given(fleets(), wishes())
def test_preemption_ends_only_lower_ones_and_makes_room(
    fleet: tuple[Topology, dict[str, int]], wanted: list[Request]
) -> None:
    topology, free = fleet
    wish, *others = wanted
    made = planner.plan_all(topology, free, others, looks=0)
    sitting = [
        placed_as(other, plan.bundles) for other in others if isinstance(plan := made[other.engine_id], Plan)
    ]
    left = dict(free)
    for engine in sitting:
        take(left, engine)
    try:
        plan = planner.plan(topology, left, wish, sitting, preempt=True)
    except NoRoom:
        return
    ended = [engine for engine in sitting if engine.engine_id in plan.preempts]
    assert len(ended) == len(plan.preempts)
    assert all(engine.priority < wish.priority for engine in ended)
    for engine in ended:
        give_back(left, engine)
    check_engine({node.node_id: node for node in topology.nodes}, wish, plan)
    assert all(left[b.node_id] >> b.npu & 1 for b in plan.bundles if b.npu is not None)
    for engine in ended:  # not one of them could have stayed
        take(left, engine)
        try:
            planner.plan(topology, left, wish)
        except NoRoom:
            give_back(left, engine)
            continue
        raise AssertionError(f"{engine.engine_id} is ended for nothing")


def take(left: dict[str, int], engine: Placed) -> None:
    for bundle in engine.bundles:
        assert bundle.npu is not None
        left[bundle.node_id] &= ~(1 << bundle.npu)


def give_back(left: dict[str, int], engine: Placed) -> None:
    for bundle in engine.bundles:
        assert bundle.npu is not None
        left[bundle.node_id] |= 1 << bundle.npu
