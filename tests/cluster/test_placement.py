"""Placement: the plan, the ledger of promises, and reading Ray's answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet.cluster.placement import ray_state
from npufleet.cluster.placement.ledger import PROMISE_S, Ledger
from npufleet.cluster.placement.plan import Node, NoRoom, Request, Topology, plan


def topology(*npus: int) -> Topology:
    return Topology(nodes=tuple(Node(node_id=f"n{i}", npus=n) for i, n in enumerate(npus)))


def request(size: int, engine: str = "e") -> Request:
    return Request(engine_id=engine, model="m", tensor_parallel_size=size)


def test_the_fullest_node_that_fits_is_taken() -> None:
    made = plan(topology(8, 8, 8), {"n0": 8, "n1": 3, "n2": 1}, request(2))
    assert [bundle.node_id for bundle in made.bundles] == ["n1", "n1"]
    assert [bundle.rank for bundle in made.bundles] == [0, 1]
    assert made.npus_on("n1") == 2


def test_equal_nodes_are_taken_in_order() -> None:
    assert plan(topology(4, 4), {"n0": 4, "n1": 4}, request(1)).bundles[0].node_id == "n0"


@pytest.mark.parametrize(
    ("npus", "free", "size", "said", "never"),
    [
        ((), {}, 1, "no node of the Ray cluster offers the resource NPU", True),
        ((0, 0), {}, 1, "no node of the Ray cluster offers the resource NPU", True),
        ((4, 8), {"n0": 4, "n1": 8}, 16, "the largest node has 8", True),
        ((4, 4), {"n0": 1, "n1": 2}, 3, "free are: n0 1 of 4, n1 2 of 4", False),
    ],
)
def test_refusals_name_what_is_missing(
    npus: tuple[int, ...], free: dict[str, int], size: int, said: str, never: bool
) -> None:
    with pytest.raises(NoRoom) as error:
        plan(topology(*npus), free, request(size))
    assert said in str(error.value)
    assert error.value.never is never


@given(
    npus=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 8), max_size=12),
)
def test_no_npu_is_ever_given_twice(npus: list[int], sizes: list[int]) -> None:
    fleet = topology(*npus)
    ledger = Ledger()
    taken = dict.fromkeys((node.node_id for node in fleet.nodes), 0)
    for i, size in enumerate(sizes):
        try:
            made = ledger.reserve(fleet, {}, frozenset(), request(size, f"e{i}"), now=0.0)
        except NoRoom:
            assert all(node.npus - taken[node.node_id] < size for node in fleet.nodes)
            continue
        assert len({bundle.node_id for bundle in made.bundles}) == 1
        taken[made.bundles[0].node_id] += size
    assert all(taken[node.node_id] <= node.npus for node in fleet.nodes)


def test_promises_end_when_placed_released_or_lapsed() -> None:
    fleet = topology(1)
    ledger = Ledger()
    ledger.reserve(fleet, {}, frozenset(), request(1, "a"), now=0.0)
    with pytest.raises(NoRoom):
        ledger.reserve(fleet, {}, frozenset(), request(1, "b"), now=1.0)
    with pytest.raises(NoRoom):  # placed: the promise is gone, the NPU is held
        ledger.reserve(fleet, {"n0": 1}, frozenset({"a"}), request(1, "b"), now=1.0)
    ledger.reserve(
        fleet, {}, frozenset(), request(1, "b"), now=1.0
    )  # and free again once its group is removed
    ledger.release("b")
    ledger.reserve(fleet, {}, frozenset(), request(1, "c"), now=2.0)
    ledger.reserve(fleet, {}, frozenset(), request(1, "d"), now=2.0 + PROMISE_S)


def test_an_engine_that_asks_again_replaces_its_promise() -> None:
    ledger = Ledger()
    for _ in range(3):
        assert ledger.reserve(topology(1), {}, frozenset(), request(1, "a"), now=0.0).engine_id == "a"


def test_rays_answers() -> None:
    nodes = [
        {
            "NodeID": "b",
            "Alive": True,
            "Resources": {"NPU": 4.0, "CPU": 2.0},
            "NodeManagerAddress": "10.0.0.2",
        },
        {"NodeID": "a", "Alive": True, "Resources": {}, "Labels": {"zone": "1"}},
        {"NodeID": "c", "Alive": False, "Resources": {"NPU": 8.0}},
    ]
    found = ray_state.topology(nodes)
    assert [(node.node_id, node.npus) for node in found.nodes] == [("a", 0), ("b", 4)]
    assert found.npus == 4
    groups = {
        "1": {
            "state": "CREATED",
            "bundles": {0: {"NPU": 1.0}, 1: {"NPU": 1.0}},
            "bundles_to_node_id": {0: "b", 1: "b"},
        },
        "2": {"state": "REMOVED", "bundles": {0: {"NPU": 1.0}}, "bundles_to_node_id": {0: "b"}},
        "3": {"state": "PENDING", "bundles": {0: {"NPU": 1.0}}, "bundles_to_node_id": {0: ""}},
        "4": {"state": "CREATED", "bundles": {0: {"CPU": 1.0}}, "bundles_to_node_id": {0: "a"}},
    }
    assert dict(+ray_state.reserved(groups)) == {"b": 2}
