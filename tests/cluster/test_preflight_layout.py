"""What is refused before anything starts: layouts that no NPUs can hold, and clusters that lack something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npufleet.cluster import config, preflight, preflight_cluster
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.model import Topology


def fleet(*models: dict[str, Any]) -> config.FleetConfig:
    named = [{"name": f"m{i}", "source": "/m", **model} for i, model in enumerate(models)]
    return config.from_dict({"device": "virtual", "models": named})


def servers(*kinds: str) -> Topology:
    return Topology(nodes=tuple(simulated.server(kind, f"n{i}") for i, kind in enumerate(kinds)))


def tp(size: int, engines: int = 1, **more: Any) -> dict[str, Any]:
    return {"engine": {"tensor_parallel_size": size}, "engines": engines, **more}


@pytest.mark.parametrize(
    ("topology", "models", "said"),
    [
        (servers("a3"), [tp(3)], "on Ascend910_9391 an engine takes one NPU or an even number, in whole packages"),
        (servers("a2", "a2"), [tp(16)], "the largest domain holds 8 (rule hccs); it would fit with "
         "tensor_parallel_size 8 and pipeline_parallel_size 2"),
        (servers("a2-16"), [tp(9)], "takes an even number, half of them in each ring"),
        (servers("a2"), [tp(4, 3)], "1 of 3 engines find no room even if nothing else runs: 3 x 4 for m0 NPUs are "
         "asked for, 8 healthy ones are there"),
        (servers("a2", "a3"), [tp(8, chip="Ascend910B3"), tp(4, chip="Ascend910B3")], "1 of 2 engines find no room"),
        (servers("a2"), [tp(2, chip="Ascend910_9391")], "but the fleet has 8 healthy Ascend910B3 (rule one-chip)"),
        (servers(), [tp(1)], "no node of the Ray cluster offers the resource NPU"),
    ],
    ids=["die pairs", "two nodes", "rings", "too few", "too few of a chip", "another chip", "no NPU"],
)  # fmt: skip
def test_impossible_layouts(topology: Topology, models: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError) as error:
        preflight.layout(fleet(*models), topology)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_possible_layouts() -> None:
    preflight.layout(fleet(tp(8), tp(4, 2), tp(16)), servers("a2", "a2", "a3"))


MISSING = {"name": "model m", "text": "/m/config.json does not exist on this node", "remedy": "copy it"}
TAKEN = {
    "name": "port 8000",
    "text": "gateway cannot listen on 127.0.0.1:8000",
    "remedy": "stop what uses it",
}


def test_a_node_that_an_engine_needs_must_have_the_checkpoint() -> None:
    node = simulated.server("a2", "n", address="10.0.0.2")
    said: list[str] = []
    with pytest.raises(
        ValueError, match=r"^node 10.0.0.2: /m/config.json does not exist on this node; copy it$"
    ):
        preflight_cluster.judge(node, [MISSING], planned=True, say=said.append)
    preflight_cluster.judge(node, [MISSING], planned=False, say=said.append)
    assert said == [
        "warning: node 10.0.0.2: /m/config.json does not exist on this node; no engine can be placed there"
    ]
    preflight_cluster.judge(
        simulated.server("a2", "h", indices=()), [MISSING], planned=False, say=said.append
    )
    assert len(said) == 1  # a head without NPUs needs none


def test_what_a_node_looks_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    doors = (config.GatewayConfig(), config.RouterConfig())
    assert preflight_cluster._look([], [("m", str(tmp_path))], sys.executable, *doors) == []
    (finding,) = preflight_cluster._look([], [], "/no/python", *doors)
    with pytest.raises(ValueError, match=r"/no/python is not there; install npufleet at the same path"):
        preflight_cluster.judge(simulated.server("a2", "n"), [finding], planned=False, say=print)


def test_a_port_must_be_free_on_every_node() -> None:
    with pytest.raises(ValueError, match=r"gateway cannot listen on 127.0.0.1:8000; stop what uses it"):
        preflight_cluster.judge(simulated.server("a2", "n"), [TAKEN], planned=False, say=print)


@pytest.mark.parametrize(
    ("running", "said"),
    [
        ({"fleet": "npufleet"}, "the fleet 'npufleet' already runs on this Ray cluster, which serves one fleet"),
        ({"fleet": "other"}, "the fleet 'other' already runs on this Ray cluster"),
        (None, "a fleet already runs on this Ray cluster"),
    ],
)  # fmt: skip
def test_a_second_fleet_does_not_take_the_place_of_the_first(
    running: dict[str, str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    def result(timeout_s: float) -> dict[str, str]:
        if running is None:
            raise TimeoutError
        return running

    asked = SimpleNamespace(remote=lambda: SimpleNamespace(result=result))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": None}))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *names: SimpleNamespace(status=asked))
    with pytest.raises(ValueError) as error:
        preflight_cluster.nobody_else(fleet(tp(1)), "app")
    assert said in str(error.value)
    preflight_cluster.nobody_else(fleet(tp(1)), "another application")


@pytest.mark.parametrize("door", ["gateway", "router", "metrics"])
def test_any_free_port_is_nothing_for_a_cluster(door: str) -> None:
    made = {"device": "virtual", "models": [{"name": "m", "source": "/m"}]}
    preflight_cluster.named_ports(config.from_dict(made))
    with pytest.raises(
        ValueError, match=rf"^{door}.port: 0 \(any free port\) is for a fleet with a Ray of its own"
    ):
        preflight_cluster.named_ports(config.from_dict({**made, door: {"port": 0}}))
