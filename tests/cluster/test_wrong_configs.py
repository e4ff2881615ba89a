"""Every kind of wrong configuration is one clear line before anything starts: here with `npufleet serve` on one machine
and on a cluster, and with `npufleet deploy` on a cluster. Nothing here starts a fleet.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from cryptography.hazmat.primitives import serialization

from npufleet.cluster import cli, config, device, local, preflight, preflight_cluster, runs
from npufleet.cluster.device import Device
from npufleet.cluster.placement.ray_state import State
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.model import Topology
from tests.cluster import certificates

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


def written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


LOCAL: dict[str, tuple[Wrong, str]] = {
    "unknown key": (lambda f: fleet(f, routr={}), "unknown key 'routr'; did you mean 'router'?"),
    "unknown engine argument": (lambda f: fleet(f, engine={"max_modl_len": 9}), "did you mean 'max_model_len'?"),
    "impossible layout": (
        lambda f: fleet(f, tp=2, model={"chip": "Ascend310P3"}),
        "but the fleet has 8 healthy Ascend910B3 (rule one-chip)",
    ),
    "too few NPUs": (lambda f: fleet(f, tp=4, engines=3), "12 NPUs are asked for (3 x 4 for m), 8 virtual NPUs"),
    "wrong value for vLLM": (lambda f: fleet(f, engine={"max_model_len": "32k"}), "max_model_len: expected int"),
    "no certificate": (
        lambda f: fleet(f, gateway={"port": 0, "tls": {"certificate": "/absent", "key": "/absent"}}),
        "gateway.tls: the TLS files cannot be used (/absent, /absent): ",
    ),
    "no certificate for engines": (
        lambda f: fleet(
            f, router={"port": 0, "engine_tls": {"ca": "/absent", "certificate": "/absent", "key": "/absent"}}
        ),
        "router.engine_tls: the TLS files cannot be used",
    ),
    "no keys": (lambda f: fleet(f, router={"port": 0, "api_keys": "/absent"}), "router.api_keys: cannot read /absent"),
    "a short secret": (
        lambda f: fleet(f, router={"port": 0, "secret": written(f / "secret", "abc")}), "has 3 bytes; at least 32",
    ),
    "a rank table without addresses": (
        lambda f: fleet(f, model={"rank_table": True}),
        "model 'm': rank_table: the RoCE address of NPU 0 of",
    ),
    "no such path": (lambda f: fleet(f, model={"source": "/absent"}), "its source is '/absent'; expected a folder"),
}  # fmt: skip


def test_a_key_with_a_password_is_refused_and_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pem = certificates.Authority(tmp_path).sign("router")
    private = serialization.load_pem_private_key(pem.key.read_bytes(), None)
    pem.key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"1234"),
        )
    )
    wrong = fleet(tmp_path) | {
        "router": {"port": 0, "tls": {"certificate": str(pem.certificate), "key": str(pem.key)}}
    }
    refused(wrong, tmp_path, capsys, "the key is encrypted; give it without a password")


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1:0", "127.0.0.1:65536"])
def test_an_address_that_is_none(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(fleet(tmp_path), tmp_path, capsys, "--address", "--address", address)


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


def test_doors_that_a_node_cannot_open(
    cluster: dict[str, list[dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = config.from_dict(fleet(tmp_path, gateway={"api_keys": "/absent"}))
    monkeypatch.setattr(
        preflight_cluster,
        "on_each",
        lambda nodes, look, *given: {node.node_id: look(*given) for node in nodes},
    )
    for check in (begin, change):
        with pytest.raises(
            ValueError, match=r"^node 10.0.0.2: gateway.api_keys: cannot read /absent: .*on any node"
        ):
            check(wish)


def test_something_else_than_ray_at_its_address() -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    with pytest.raises(ConnectionError, match="not the head of a Ray cluster"):
        preflight.cluster(f"127.0.0.1:{port}")
    other.stop(None)


def begin(wish: config.FleetConfig) -> None:
    preflight_cluster.check(preflight.with_free_ports(wish), "app", lambda text: None)


def change(wish: config.FleetConfig) -> None:
    preflight_cluster.check_change(wish, lambda text: None)
