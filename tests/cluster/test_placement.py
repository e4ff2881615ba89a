"""Where engines sit: the rules of each chip, the aim, refusals, promises, and reading Ray's answers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from npufleet.cluster.endpoints import Role
from npufleet.cluster.placement import cost, planner, ray_state, search
from npufleet.cluster.placement.board import Board
from npufleet.cluster.placement.ledger import PROMISE_S, Ledger
from npufleet.cluster.placement.plan import Bundle, NoRoom, Placed, Plan, Request, Rule, placed_as
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.labels import resources, to_labels
from npufleet.cluster.topology.model import Topology, mask_of


def fleet(*kinds: str, **told: object) -> Topology:
    return Topology(nodes=tuple(simulated.server(kind, f"n{i}", **told) for i, kind in enumerate(kinds)))


def request(
    tp: int, pp: int = 1, dp: int = 1, *, engine: str = "e", ep: bool = False, **more: object
) -> Request:
    settings = {"model": "m", **more}
    return Request(
        engine_id=engine,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        expert_parallel=ep,
        **settings,  # type: ignore[arg-type]
    )


def free(topology: Topology, **left: Iterable[int]) -> dict[str, int]:
    return {**planner.idle(topology), **{name: mask_of(indices) for name, indices in left.items()}}


def where(plan: Plan) -> list[tuple[str, int | None]]:
    return [(bundle.node_id, bundle.npu) for bundle in plan.bundles]


def on(node: str, *npus: int) -> list[tuple[str, int]]:
    return [(node, npu) for npu in npus]


def test_the_fullest_node_that_fits_is_taken() -> None:
    a2 = fleet("a2", "a2", "a2")
    made = planner.plan(a2, free(a2, n1=(2, 5, 6), n2=(4,)), request(2))
    assert where(made) == on("n1", 2, 5)
    assert [bundle.rank for bundle in made.bundles] == [0, 1]
    assert made.npus_on("n1") == 2


def test_unhealthy_npus_are_left_out() -> None:
    a2 = fleet("a2", unhealthy=(0, 1))
    assert where(planner.plan(a2, planner.idle(a2), request(6))) == on("n0", *range(2, 8))
    with pytest.raises(NoRoom, match="the fleet has 6 healthy Ascend910B3: 2 are missing"):
        planner.plan(a2, planner.idle(a2), request(8))


@pytest.mark.parametrize(
    ("kind", "left", "tp", "dp", "npus"),
    [
        ("a3", (0, 1, 2, 3, 4, 5, 6, 7), 4, 1, (0, 1, 2, 3)),
        ("a3", (1, 2, 4, 5, 6, 7), 2, 1, (4, 5)),  # whole packages only
        ("a3", (0, 1, 3, 4, 5), 1, 1, (3,)),  # one alone takes what is halved already
        ("a3", (3, 4, 5, 8, 9), 1, 4, (4, 5, 8, 9)),
        ("a2-16", (0, 1, 2, 8, 9, 10, 11), 4, 1, (8, 9, 10, 11)),  # one ring
        ("a2-16", (0, 1, 2, 8, 9, 10, 11, 12), 3, 1, (0, 1, 2)),  # the fuller ring
        ("a2-16", tuple(range(16)), 10, 1, (0, 1, 2, 3, 4, 8, 9, 10, 11, 12)),  # both, at the same positions
        (
            "a2-16",
            (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14),
            12,
            1,
            (1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14),
        ),
        ("310p", (1, 3), 2, 1, (1, 3)),
    ],
)
def test_the_rules_of_each_chip(
    kind: str, left: tuple[int, ...], tp: int, dp: int, npus: tuple[int, ...]
) -> None:
    one = fleet(kind)
    assert where(planner.plan(one, free(one, n0=left), request(tp, dp=dp))) == on("n0", *npus)


@pytest.mark.parametrize(
    ("kinds", "left", "wish", "rule", "never", "said"),
    [
        ((), {}, request(1), Rule.NPUS, True, "no node of the Ray cluster offers the resource NPU"),
        (("a2", "a2"), {}, request(16), Rule.HCCS, True, "the largest domain holds 8 (rule hccs); it would fit "
         "with tensor_parallel_size 8 and pipeline_parallel_size 2"),
        (("a2",), {}, request(8, dp=2), Rule.NPUS, True, "the fleet has 8 healthy Ascend910B3: 8 are missing "
         "(rule npus); it would fit with data_parallel_size 1"),
        (("a3",), {}, request(3), Rule.DIE_PAIRS, True, "one NPU or an even number, in whole packages"),
        (("a3",), {}, request(1, dp=3), Rule.DIE_PAIRS, True, "it would fit with data_parallel_size 1"),
        (("a2-16",), {}, request(11), Rule.RINGS, True, "more than 8 NPUs takes an even number, half of them"),
        (("a2", "a3"), {}, request(8, dp=3), Rule.ONE_CHIP, True, "no kind of chip has as many: 8 healthy "
         "Ascend910B3 and 16 healthy Ascend910_9391"),
        (("a2",), {}, request(2, soc="Ascend910B1"), Rule.ONE_CHIP, True, "needs 2 Ascend910B1 in one HCCS "
         "domain, but the fleet has 8 healthy Ascend910B3"),
        (("a2", "a2"), {"n0": (0,), "n1": (1, 2)}, request(4), Rule.NPUS, False,
         "free are: n0 1 of 8, n1 2 of 8: 1 are missing (rule npus); there is room now for it with "
         "tensor_parallel_size 2"),
        (("a2", "a2"), {"n0": (0, 1), "n1": (1, 2)}, request(4), Rule.HCCS, False, "not close enough together "
         "(rule hccs); there is room now for it with tensor_parallel_size 2 and pipeline_parallel_size 2"),
        (("a3",), {"n0": (0, 2, 4)}, request(1, dp=2), Rule.DIE_PAIRS, False, "not in whole packages"),
    ],
)  # fmt: skip
def test_refusals(
    kinds: tuple[str, ...],
    left: dict[str, tuple[int, ...]],
    wish: Request,
    rule: Rule,
    never: bool,
    said: str,
) -> None:
    topology = fleet(*kinds)
    with pytest.raises(NoRoom) as error:
        planner.plan(topology, free(topology, **left), wish)
    assert said in str(error.value)
    assert (error.value.rule, error.value.never) == (rule, never)
    if near := error.value.closest:
        planner.plan(topology, planner.idle(topology) if never else free(topology, **left), near)


def test_ranks_of_a_pipeline_share_a_node_where_they_can() -> None:
    a2 = fleet("a2", "a2", "a2")
    made = planner.plan(a2, free(a2, n0=(0, 1, 2, 3, 4, 5)), request(2, pp=2, dp=3))
    assert where(made)[:8] == on("n1", *range(8))
    assert {node for node, _ in where(made)[8:]} == {"n0"}  # the fuller one


def test_experts_stay_in_one_super_pod() -> None:
    pods = simulated.fleet({"a3": 4}, pod_servers=2)
    made = planner.plan(pods, free(pods, **{"a3-00000": (0, 1)}), request(16, dp=2, ep=True))
    assert {pods.nodes[i].super_pod for i in (2, 3)} == {"1"}
    assert {node for node, _ in where(made)} == {"a3-00002", "a3-00003"}
    with pytest.raises(
        NoRoom, match="its experts must share one super-pod, and the largest, super-pod 0, holds 32"
    ) as e:
        planner.plan(pods, planner.idle(pods), request(16, dp=4, ep=True))
    assert e.value.rule is Rule.SUPER_POD
    assert len(planner.plan(pods, planner.idle(pods), request(16, dp=4)).bundles) == 64  # replicas may part


def test_a_group_wider_than_a_node_takes_whole_nodes_of_a_super_pod() -> None:
    pods = simulated.fleet({"a3": 4}, pod_servers=2)
    made = planner.plan(pods, free(pods, **{"a3-00001": range(15)}), request(32))
    assert {node for node, _ in where(made)} == {"a3-00002", "a3-00003"}
    with pytest.raises(NoRoom, match="rule hccs"):
        planner.plan(pods, planner.idle(pods), request(64))


def test_replicas_sit_in_different_failure_domains() -> None:
    racks = simulated.fleet({"a2": 4}, rack_servers=2)
    made = planner.plan_all(racks, planner.idle(racks), [request(2, engine=f"e{i}") for i in range(2)])
    homes = {plan.bundles[0].node_id for plan in made.values() if isinstance(plan, Plan)}
    assert homes == {"a2-00000", "a2-00002"}
    other = planner.plan_all(
        racks, planner.idle(racks), [request(2, engine=f"e{i}", model=f"m{i}") for i in range(2)]
    )
    assert {plan.bundles[0].node_id for plan in other.values() if isinstance(plan, Plan)} == {"a2-00000"}


def test_prefill_and_decode_sit_in_one_super_pod() -> None:
    pods = simulated.fleet({"a3": 4}, pod_servers=2, rack_servers=1)
    prefill = placed_as(
        request(16, engine="p", role=Role.PREFILL), planner.plan(pods, free(pods, **{"a3-00000": (), "a3-00001": ()}),
                                                                 request(16)).bundles
    )  # fmt: skip
    assert prefill.bundles[0].node_id == "a3-00002"
    taken = free(pods, **{"a3-00002": ()})
    assert planner.plan(pods, taken, request(8, role=Role.DECODE), [prefill]).bundles[0].node_id == "a3-00003"
    assert planner.plan(pods, taken, request(8), [prefill]).bundles[0].node_id == "a3-00000"


def test_small_engines_leave_room_for_large_ones() -> None:
    a2 = fleet("a2", "a2")
    wishes = [request(1, engine=f"s{i}") for i in range(8)] + [request(8, engine="large", model="l")]
    made = planner.plan_all(a2, planner.idle(a2), wishes)
    assert all(isinstance(plan, Plan) for plan in made.values())
    important = [request(1, engine="first", priority=1), request(8, engine="large"), request(8, engine="two")]
    late = planner.plan_all(a2, planner.idle(a2), important)
    assert isinstance(late["first"], Plan)
    assert sum(isinstance(plan, NoRoom) for plan in late.values()) == 1


def placed(engine: str, priority: int, *bundles: tuple[str, int]) -> Placed:
    plan = [Bundle(rank=i, node_id=node, npu=npu) for i, (node, npu) in enumerate(bundles)]
    return Placed(engine_id=engine, bundles=tuple(plan), model=engine, priority=priority)


def test_preemption_only_where_allowed_and_of_as_few_as_needed() -> None:
    a2 = fleet("a2", "a2")
    engines = [
        placed("low", 0, *on("n0", 0, 1)),
        placed("lower", -1, *on("n1", 0)),
        placed("same", 1, *on("n1", 1)),
    ]
    left = free(a2, n0=range(2, 8), n1=range(2, 8))
    wish = request(8, priority=1)
    with pytest.raises(NoRoom):
        planner.plan(a2, left, wish, engines)
    made = planner.plan(a2, left, wish, engines, preempt=True)
    assert made.preempts == ("low",)  # ending the least important one alone would not do
    assert where(made) == on("n0", *range(8))
    with pytest.raises(NoRoom):
        planner.plan(a2, left, request(8), engines, preempt=True)


def test_cost_counts_what_the_aim_says() -> None:
    racks = simulated.fleet({"a3": 2}, pod_servers=1, rack_servers=1)
    assert cost.of(racks, []) == 0
    halved = placed("a", 0, ("a3-00000", 0))
    assert cost.of(racks, [halved]) == cost.OPENED + cost.HALVED
    twins = [placed("a", 0, ("a3-00000", 0)), placed("a", 0, ("a3-00000", 1))]
    assert cost.of(racks, twins) == cost.OPENED + cost.CROWDED
    wide = placed("a", 0, ("a3-00000", 0), ("a3-00000", 1), ("a3-00001", 0), ("a3-00001", 1))
    assert cost.of(racks, [wide]) == 2 * cost.OPENED + cost.SPAN
    far = [
        Placed(
            engine_id=role, model="m", role=Role(role), bundles=placed("", 0, (node, 0), (node, 1)).bundles
        )
        for role, node in (("prefill", "a3-00000"), ("decode", "a3-00001"))
    ]
    assert cost.of(racks, far) == 2 * cost.OPENED + 2 * cost.APART


def ray_node(node_id: str, npus: int, *, exact: bool = True, alive: bool = True) -> dict[str, object]:
    node = simulated.server("a2", node_id, indices=tuple(range(npus)))
    given = {"Resources": {"NPU": float(npus)}, "Labels": {}}
    if exact:
        given = {"Resources": {k: float(v) for k, v in resources(node).items()}, "Labels": to_labels(node)}
    return {"NodeID": node_id, "Alive": alive, **given}


def group(name: str, node_id: str, *npus: int | None, state: str = "CREATED") -> dict[str, object]:
    return {
        "name": name,
        "state": state,
        "bundles": {
            i: {"NPU": 1.0, **({} if npu is None else {f"npufleet-npu-{npu}": 1.0})}
            for i, npu in enumerate(npus)
        },
        "bundles_to_node_id": dict.fromkeys(range(len(npus)), node_id),
    }


def test_rays_answers() -> None:
    nodes = [ray_node("b", 4), ray_node("a", 0), ray_node("c", 8, alive=False), ray_node("d", 2, exact=False)]
    groups = {
        "1": group("e1", "b", 3, None),
        "2": group("e2", "b", 0, state="REMOVED"),
        "3": group("e3", "", 1, state="PENDING"),
        "4": {"name": "", "state": "CREATED", "bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: "a"}},
        "5": group("", "d", None),
        "6": {**group("e6", "gone", 1), "state": "RESCHEDULING"},
    }
    found = ray_state.state(nodes, groups)
    assert [(node.node_id, node.npus, node.exact) for node in found.topology.nodes] == [
        ("a", 0, False), ("b", 4, True), ("d", 2, False),
    ]  # fmt: skip
    assert found.free() == {"a": 0, "b": 0b0110, "d": 0b10}
    assert (found.held("b"), found.held("d")) == (2, 1)
    assert found.created == {"e1"}
    assert set(ray_state.exact(found.topology)) == {"b"}


def state(topology: Topology, **groups: dict[str, object]) -> ray_state.State:
    return ray_state.state([ray_node(node.node_id, node.npus) for node in topology.nodes], groups)


def test_promises_end_when_placed_released_or_lapsed() -> None:
    one = fleet("a2", indices=(0,))
    ledger = Ledger()
    ledger.reserve(state(one), request(1, engine="a"), 0.0)
    with pytest.raises(NoRoom):
        ledger.reserve(state(one), request(1, engine="b"), 1.0)
    with pytest.raises(NoRoom):  # placed: the promise is gone, the NPU is held
        ledger.reserve(state(one, x=group("a", "n0", 0)), request(1, engine="b"), 1.0)
    ledger.reserve(state(one), request(1, engine="b"), 1.0)  # and free again once its group is removed
    ledger.release("b")
    ledger.reserve(state(one), request(1, engine="c"), 2.0)
    ledger.reserve(state(one), request(1, engine="d"), 2.0 + PROMISE_S)


def test_an_engine_that_asks_again_replaces_its_promise() -> None:
    ledger = Ledger()
    for _ in range(3):
        assert ledger.reserve(state(fleet("a2")), request(8, engine="a"), 0.0).engine_id == "a"


def test_room_is_kept_for_engines_that_come_first() -> None:
    ledger, one = Ledger(), fleet("a2")
    large = request(8, engine="wanted", model="large")
    with pytest.raises(NoRoom, match="kept for engines of 'large', which come first"):
        ledger.reserve(state(one), request(1), 0.0, others=[large])
    assert ledger.reserve(state(one), large, 0.0, others=[request(1)]).npus_on("n0") == 8


def test_the_ledger_preempts_where_it_may() -> None:
    ledger, one = Ledger(), fleet("a2")
    busy = state(one, x=group("low", "n0", *range(8)))
    known = {"low": Placed(engine_id="low", bundles=(), model="low", priority=0)}
    wish = request(4, priority=2)
    with pytest.raises(NoRoom):
        ledger.reserve(busy, wish, 0.0, describe=known.get)
    assert ledger.reserve(busy, wish, 0.0, describe=known.get, preempt=True).preempts == ("low",)
    with pytest.raises(NoRoom):  # of a stranger nothing is known
        ledger.reserve(busy, wish, 0.0, preempt=True)


def test_the_search_keeps_nothing_that_is_worse() -> None:
    a2 = fleet("a2", "a2", "a2")
    wanted = [request(4, engine=f"e{i}", model=f"m{i}") for i in range(3)]
    board = Board(a2, planner.idle(a2))
    sitting: dict[str, Placed] = {}
    for wish in wanted:
        bundles = planner.place(board, wish)
        assert bundles is not None
        sitting[wish.engine_id] = placed_as(wish, bundles)
        board.take(sitting[wish.engine_id])
    spent = board.spent

    def scattered(board: Board, wish: Request) -> tuple[Bundle, ...] | None:
        node = max(a2.nodes, key=lambda node: board.free(node.node_id).bit_count())
        return planner.place(Board(Topology(nodes=(node,)), {node.node_id: board.free(node.node_id)}), wish)

    search.improve(board, wanted, sitting, scattered)
    assert board.spent == spent == cost.of(a2, sitting.values()) == 2 * cost.OPENED


def test_the_search_frees_a_node_for_an_engine_that_found_no_room() -> None:
    a2 = fleet("a2", "a2")
    wanted = [request(4, engine="a"), request(4, engine="b", model="n"), request(8, engine="c", model="o")]
    board = Board(a2, planner.idle(a2))
    sitting = {
        name: placed_as(wish, tuple(Bundle(rank=i, node_id=node, npu=i) for i in range(4)))
        for name, wish, node in (("a", wanted[0], "n0"), ("b", wanted[1], "n1"))
    }
    for engine in sitting.values():
        board.take(engine)
    search.improve(board, wanted, sitting, planner.place)
    assert sitting.keys() == {"a", "b", "c"}
