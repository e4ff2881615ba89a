"""Every kind of wrong configuration is one clear line before anything starts: here with `npufleet serve` on one machine
and on a cluster, and with `npufleet deploy` on a cluster. Nothing here starts a fleet.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from npufleet.cluster import cli, config, device, local, preflight_cluster, runs
from npufleet.cluster.device import Device
from npufleet.cluster.placement.ray_state import State
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.model import Topology

Wrong = Callable[[Path], dict[str, Any]]
TWO_CHIPS = Topology(
    nodes=(
        simulated.server("a2", "n0", address="10.0.0.2"),
        simulated.server("a3", "n1", address="10.0.0.3"),
    )
)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        device, "detect", lambda wanted=None: Device(kind="virtual", count=8, chip="Ascend910B3")
    )
    monkeypatch.setattr(local, "start", lambda *given: pytest.fail("Ray must not be started"))


def checkpoint(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return str(folder)


def fleet(folder: Path, tp: int = 1, engines: int = 1, **more: Any) -> dict[str, Any]:
    model = {"name": "m", "source": checkpoint(folder / "m"), "engines": engines}
    doors = {name: {"port": 0} for name in ("gateway", "router", "metrics")}
    model |= {"engine": {"tensor_parallel_size": tp, **more.pop("engine", {})}, **more.pop("model", {})}
    return {"name": "prod", "device": "virtual", "models": [model], **doors, **more}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


LOCAL: dict[str, tuple[Wrong, str]] = {
    "unknown key": (lambda f: fleet(f, routr={}), "unknown key 'routr'; did you mean 'router'?"),
    "unknown engine argument": (lambda f: fleet(f, engine={"max_modl_len": 9}), "did you mean 'max_model_len'?"),
    "impossible layout": (
        lambda f: fleet(f, tp=2, model={"chip": "Ascend310P3"}),
        "but the fleet has 8 healthy Ascend910B3 (rule one-chip)",
    ),
    "too few NPUs": (lambda f: fleet(f, tp=4, engines=3), "12 NPUs are asked for (3 x 4 for m), 8 virtual NPUs"),
    "no such path": (lambda f: fleet(f, model={"source": "/absent"}), "its source is '/absent'; expected a folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOCAL)
def test_on_this_machine(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = LOCAL[what]
    refused(make(tmp_path), tmp_path, capsys, said)


def test_a_port_in_use(taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fleet(tmp_path) | {"gateway": {"port": taken}}
    refused(wrong, tmp_path, capsys, f"gateway cannot listen on 127.0.0.1:{taken}")


def test_two_fleets_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = psutil.Process(os.getppid())
    runs.record(
        runs.Run(
            name="prod", pid=other.pid, started=other.create_time(), gateway="", router="", controller=""
        )
    )
    refused(fleet(tmp_path), tmp_path, capsys, "a fleet named 'prod' already runs here")


def refused(
    data: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], said: str, *more: str
) -> None:
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(data))
    assert cli.main(["serve", str(file), *more]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, str]]]:
    """A cluster of an A2 and an A3 server; returns what its nodes find wrong, by node id."""
    found: dict[str, list[dict[str, str]]] = {"n0": [], "n1": []}
    state = State(topology=TWO_CHIPS, groups={}, created=frozenset())
    monkeypatch.setattr(preflight_cluster.ray_state, "read", lambda: state)
    monkeypatch.setattr(preflight_cluster, "nobody_else", lambda *given: None)
    monkeypatch.setattr(
        preflight_cluster,
        "on_each",
        lambda nodes, *given: {node.node_id: found[node.node_id] for node in nodes},
    )
    return found


def test_chips_are_not_mixed_in_one_engine(cluster: Any, tmp_path: Path) -> None:
    wish = config.from_dict(fleet(tmp_path, tp=4, engine={"data_parallel_size": 6}))
    for check in (begin, change):
        with pytest.raises(ValueError, match=r"no kind of chip has as many: 8 healthy .* and 16 healthy"):
            check(wish)


def test_a_path_that_a_node_lacks(cluster: dict[str, list[dict[str, str]]], tmp_path: Path) -> None:
    lacks = {"name": "model m", "text": "/m/config.json does not exist on this node", "remedy": "copy it"}
    wish = config.from_dict(fleet(tmp_path, engines=24))
    cluster["n1"].append(lacks)
    with pytest.raises(
        ValueError, match=r"^node 10.0.0.3: /m/config.json does not exist on this node; copy it$"
    ):
        begin(wish)
    said: list[str] = []
    preflight_cluster.check_change(wish, said.append)
    assert said == [
        "warning: nodes 10.0.0.3: /m/config.json does not exist on this node; no engine can be placed there"
    ]
    cluster["n0"].append(lacks)
    with pytest.raises(ValueError, match=r"^on every node of the fleet: /m/config.json does not exist"):
        change(wish)


def begin(wish: config.FleetConfig) -> None:
    preflight_cluster.check(wish, "app", lambda text: None)


def change(wish: config.FleetConfig) -> None:
    preflight_cluster.check_change(wish, lambda text: None)
