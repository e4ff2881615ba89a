"""The controller's part in placement: answers to engines, room for those that are still wanted, preemption."""

from __future__ import annotations

from typing import Any

import pytest

from npufleet.cluster import config
from npufleet.cluster.controller.placer import Placer, nodes
from npufleet.cluster.controller.progress import EngineProgress, Phase, ProgressBoard
from npufleet.cluster.controller.registry import Registry
from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.placement import ray_state, requests
from npufleet.cluster.topology import labels, simulated
from npufleet.cluster.topology.model import Node


def ray_node(node: Node, *, exact: bool = True) -> dict[str, Any]:
    resources = labels.resources(node) if exact else {"NPU": node.npus}
    return {
        "NodeID": node.node_id,
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{node.node_id[1:]}",
        "Resources": {name: float(count) for name, count in resources.items()},
        "Labels": labels.to_labels(node) if exact else {labels.TYPE: node.soc},
    }


def held(engine: str, node: str, *npus: int) -> dict[str, Any]:
    return {
        "name": engine,
        "state": "CREATED",
        "bundles": {i: {"NPU": 1.0, labels.npu_resource(npu): 1.0} for i, npu in enumerate(npus)},
        "bundles_to_node_id": dict.fromkeys(range(len(npus)), node),
    }


def state(kinds: list[str], *groups: dict[str, Any], exact: bool = True) -> ray_state.State:
    fleet = [ray_node(simulated.server(kind, f"n{i}"), exact=exact) for i, kind in enumerate(kinds)]
    return ray_state.state(fleet, {str(i): group for i, group in enumerate(groups)})


def placer(*models: dict[str, Any], **top: Any) -> Placer:
    made = config.from_dict(
        {"device": "virtual", "models": [{"source": "/m", **model} for model in models], **top}
    )
    return Placer(config=made, registry=Registry(), progress=ProgressBoard())


SMALL = {"name": "small", "engines": 2}
LARGE = {"name": "large", "engine": {"tensor_parallel_size": 8}}


def endpoint(engine: str, model: str) -> EngineEndpoint:
    return EngineEndpoint(engine_id=engine, model=model, address="h:1", metrics_url="")


def test_an_answer_names_nodes_npus_and_device() -> None:
    answer = placer(LARGE).place(state(["a2", "a2"]), "e", "large")
    assert answer == {"nodes": ["n0"] * 8, "npus": list(range(8)), "device": "virtual npu Ascend910B3"}


def test_an_engine_gets_the_npus_of_its_own_node_if_others_are_not_better() -> None:
    two = state(["a2", "a2"])
    assert placer(SMALL).place(two, "e", "small", "n1")["nodes"] == ["n1"]
    assert placer(SMALL).place(two, "e", "small", "n9")["nodes"] == ["n0"], "a node without NPUs"
    fuller = state(["a2", "a2"], held("other", "n0", 0, 1, 2))
    assert placer(SMALL).place(fuller, "e", "small", "n1")["nodes"] == ["n0"], "whole nodes stay whole"


def test_npus_are_left_to_ray_where_it_does_not_know_them() -> None:
    answer = placer(LARGE).place(state(["a2"], exact=False), "e", "large")
    assert (answer["nodes"], answer["npus"]) == (["n0"] * 8, [None] * 8)


def test_a_refusal_is_an_answer() -> None:
    answer = placer({**LARGE, "engine": {"tensor_parallel_size": 16}}).place(state(["a2"]), "e", "large")
    assert answer["never"]
    assert "the largest domain holds 8" in answer["refused"]


def test_room_is_kept_for_a_large_engine_until_it_sits_or_fails() -> None:
    here = placer(SMALL, LARGE)
    refused = here.place(state(["a2"]), "s", "small")
    assert "kept for engines of 'large'" in refused["refused"]
    assert not refused["never"]
    assert here.place(state(["a2", "a2"]), "s", "small")["nodes"] == ["n1"]  # the large one has n0
    here.progress.report(EngineProgress(engine_id="l", model="large", phase=Phase.FAILED))
    assert here.place(state(["a2"]), "t", "small")["nodes"] == ["n0"]


def test_wanted_engines_are_those_without_npus() -> None:
    here = placer(SMALL, LARGE)
    here.registry.heartbeat(endpoint("s1", "small"), 0.0)
    sitting = state(["a2"], held("s1", "n0", 0), held("stranger", "n0", 1))
    asking = requests.of(here.config.models[1], "l")
    assert [entry.model for entry in here.missing(sitting, asking)] == ["small"]
    assert [entry.model for entry in here.missing(state(["a2"]), asking)] == ["small", "small"]


def test_preemption_waits_until_the_lower_engine_is_gone() -> None:
    low, high = {"name": "low"}, {**LARGE, "name": "high", "priority": 1}
    busy = state(["a2"], held("l1", "n0", 3))
    strict = placer(low, high)
    strict.registry.heartbeat(endpoint("l1", "low"), 0.0)
    assert "free are: 10.0.0.0 7 of 8: 1 are missing" in strict.place(busy, "h", "high")["refused"]
    assert strict.leaving == {}

    here = placer(low, high, placement={"preempt": True})
    here.registry.heartbeat(endpoint("l1", "low"), 0.0)
    assert here.place(busy, "h", "high") == {"refused": "waiting for l1 to make room", "never": False}
    assert here.leaving == {"l1": "engine h of 'high' has a higher priority (1)"}
    here.registry.remove("l1")
    here.forget("l1")
    assert here.leaving == {}
    assert "refused" in here.place(state(["a2"]), "l2", "low")  # its successor does not get the room back
    assert here.place(state(["a2"]), "h", "high")["npus"] == list(range(8))


def test_nodes_show_who_holds_which_npu() -> None:
    (node,) = nodes(state(["a3"], held("e", "n0", 4, 5)), {"e": "m"})
    assert (node["npus"], node["reserved"], node["chip"]) == (16, 2, "Ascend910_9391")
    assert [entry["npu"] for entry in node["devices"] if entry["engine"] == "e"] == [4, 5]
    assert node["devices"][4] == {"npu": 4, "healthy": True, "engine": "e", "model": "m"}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"priority": "high"}, "models[0].priority: expected an integer from -1000 to 1000, got 'high'"),
        ({"chip": 3}, "models[0].chip: expected a non-empty text, got 3"),
    ],
)
def test_wrong_wishes(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        placer({"name": "m", **extra})
    assert said in str(error.value)


def test_prefill_engines_come_near_those_that_decode_for_the_same_name() -> None:
    transfer = {"kv_transfer_config": {"kv_connector": "ExampleConnector"}}
    eight = {"tensor_parallel_size": 16, **transfer}
    decode = {"name": "chat", "engine": eight, "role": "decode"}
    prefill = {"name": "chat-prompts", "serves": "chat", "engine": eight, "role": "prefill"}
    pods = simulated.fleet({"a3": 4}, pod_servers=2, rack_servers=1)
    here = placer(decode, prefill)
    here.registry.heartbeat(endpoint("d", "chat"), 0.0)
    names = [node.node_id for node in pods.nodes]
    fleet = [ray_node(node) for node in pods.nodes]
    taken = ray_state.state(fleet, {"0": held("d", names[2], *range(16))})
    assert here.place(taken, "p", "chat-prompts")["nodes"][0] == names[3]
    alone = placer(decode, {**prefill, "serves": "", "role": "both"})
    alone.registry.heartbeat(endpoint("d", "chat"), 0.0)
    assert alone.place(taken, "p", "chat-prompts")["nodes"][0] == names[0]


def test_a_request_is_what_the_engine_arguments_say() -> None:
    made = placer({**SMALL, "engine": {"tensor_parallel_size": 4}, "priority": 7, "chip": "Ascend910B3"})
    request = requests.of(made.config.models[0], "e")
    assert (request.npus, request.priority, request.soc) == (4, 7, "Ascend910B3")
    with pytest.raises(ValueError, match=r"placement.preempt: expected true or false, got 'yes'"):
        placer(SMALL, placement={"preempt": "yes"})
