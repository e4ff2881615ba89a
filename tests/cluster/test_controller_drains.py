"""Emptying a node: engines leave one at a time, and none before another one can take its requests."""

from __future__ import annotations

from dataclasses import replace

from npufleet.cluster import config
from npufleet.cluster.controller.drains import Leave, left_to_serve, must_move, nodes_of, step
from npufleet.cluster.controller.placer import nodes
from npufleet.cluster.controller.room import room, without
from npufleet.cluster.deploy.wish import Wish
from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.placement.plan import Bundle
from npufleet.cluster.placement.ray_state import State
from npufleet.cluster.topology.simulated import fleet


def engine(
    name: str, *nodes: str, state: EngineState = EngineState.READY, model: str = "m"
) -> EngineEndpoint:
    npus = tuple(f"{node}:{i}" for i, node in enumerate(nodes))
    return EngineEndpoint(
        engine_id=name, model=model, address="h:1", metrics_url="", state=state, places=npus, node_id=nodes[0]
    )


def test_an_engine_needs_the_nodes_of_its_workers_and_its_own() -> None:
    assert nodes_of(engine("e", "a", "b")) == {"a", "b"}


def test_one_of_two_leaves_then_the_other_when_a_new_one_is_ready() -> None:
    two = [engine("1", "a"), engine("2", "a")]
    assert step(["a"], two, {"m": 2}, (), {"m": 2}, {}) == Leave(engines=("1",))
    going = [engine("1", "a", state=EngineState.DRAINING), two[1]]
    assert step(["a"], going, {"m": 2}, (), {"m": 2}, {}) == Leave()
    assert step(["a"], [two[1]], {"m": 2}, (), {"m": 1}, {}) == Leave(), "its successor is still starting"
    assert step(["a"], [two[1], engine("3", "b")], {"m": 2}, (), {"m": 1}, {}) == Leave(engines=("2",))
    assert step(["a"], [engine("3", "b"), engine("4", "b")], {"m": 2}, (), {}, {}) == Leave()


def test_the_only_engine_is_lent_another_one_first_and_the_loan_ends() -> None:
    one = engine("1", "a")
    assert step(["a"], [one], {"m": 1}, (), {"m": 1}, {}) == Leave(scale={"m": 1})
    lent = ("m",)
    assert step(["a"], [one], {"m": 2}, lent, {"m": 0}, {}) == Leave()
    assert step(["a"], [one, engine("2", "b")], {"m": 2}, lent, {}, {}) == Leave(engines=("1",))
    going = engine("1", "a", state=EngineState.DRAINING)
    assert step(["a"], [going, engine("2", "b")], {"m": 2}, lent, {}, {"m": 1}) == Leave()
    assert step(["a"], [engine("2", "b")], {"m": 2}, lent, {}, {}) == Leave(), (
        "Serve may not know that it is gone"
    )
    assert step(["a"], [engine("2", "b")], {"m": 2}, lent, {}, {"m": 1}) == Leave(scale={"m": -1})
    assert step(["a"], [engine("2", "b"), engine("3", "b")], {"m": 2}, lent, {}, {}) == Leave(scale={"m": -1})
    assert step(["a"], [one], {"m": 1}, (), {"m": 0}, {}) == Leave(engines=("1",)), "nowhere to go"


def test_an_engine_starts_elsewhere_if_there_is_another_node() -> None:
    assert must_move("a", ["a"], ["a", "b"])
    assert not must_move("b", ["a"], ["a", "b"])
    assert not must_move("a", ["a"], ["a"]) and not must_move("a", ["a", "b"], ["a", "b"])


def test_models_do_not_wait_for_each_other() -> None:
    there = [engine("1", "a"), engine("2", "b"), engine("3", "a", model="n"), engine("4", "b", model="n")]
    assert step(["a"], there, {"m": 2, "n": 2}, (), {}, {}) == Leave(engines=("1", "3"))


def test_the_wish_keeps_cordons_and_loans() -> None:
    wish = Wish.of(config.from_dict({"models": [{"name": "m", "source": "/m"}]}))
    made = wish.with_cordon("a", True).with_cordon("a", True).lend({"m": 1})
    assert (made.cordoned, made.engines, made.lent) == (("a",), {"m": 2}, ("m",))
    assert Wish.from_dict(made.to_dict()) == made
    fenced = replace(made, fenced={"a:3": 12.5})
    assert Wish.from_dict(fenced.to_dict()) == fenced == fenced.changed_to(made.config).lend({"m": 1})
    assert made.lend({"m": -1}).with_cordon("a", False) == wish


def test_serve_moves_what_sits_on_a_node_that_ray_takes_away_and_the_controller_what_only_works_there() -> (
    None
):
    sits, works, apart = engine("1", "a"), engine("2", "b", "a"), engine("3", "c")
    assert left_to_serve([sits, works, apart], ["a"]) == (sits,)
    assert step(["a"], [works, apart], {"m": 3}, (), {"m": 1}, {}) == Leave(), (
        "Serve's new engine is not there yet"
    )
    assert step(["a"], [works, apart, engine("4", "c")], {"m": 3}, (), {}, {}) == Leave(engines=("2",))


def test_closed_npus_are_no_room() -> None:
    topology = fleet({"a2": 2})
    model = config.from_dict(
        {"models": [{"name": "m", "source": "/m", "engine": {"tensor_parallel_size": 4}}]}
    ).models[0]
    first, second = (node.node_id for node in topology.nodes)
    state = State(
        topology=topology, groups={"e": (Bundle(rank=0, node_id=first, npu=0),)}, created=frozenset()
    )
    assert room(state, model, 9) == 3
    assert room(without(state, {f"{second}:3"}, ()), model, 9) == 2
    assert room(without(state, {"gone:1", f"{second}:?"}, ()), model, 9) == 3
    assert room(without(state, (), {second}), model, 9) == 1
    assert room(state, model, 1) == 1
    leaving = replace(state, draining=frozenset({second}))
    assert room(without(leaving, (), ()), model, 9) == 1
    assert [told["closed"] for told in nodes(leaving, {}, [first])] == ["drained", "leaving"]
