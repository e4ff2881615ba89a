"""What a worker is told of its host: ports that no other engine takes, addresses and interfaces, the rank table."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet.cluster import config, env
from npufleet.cluster.engine import build, worker_launch
from npufleet.cluster.engine.causes import Cause
from npufleet.cluster.placement import planner
from npufleet.cluster.placement.plan import Plan, Request
from npufleet.cluster.placement.ports import HCCL_BLOCK, hccl_bases
from npufleet.cluster.placement.rank_table import rank_table
from npufleet.cluster.topology import labels, simulated
from npufleet.cluster.topology.model import Topology


def request(engine: str, tp: int, dp: int = 1) -> Request:
    return Request(engine_id=engine, model="m", tensor_parallel_size=tp, data_parallel_size=dp)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])), min_size=1, max_size=12)
)
def test_engines_on_one_host_never_share_a_port(sizes: list[tuple[int, int]]) -> None:
    fleet = simulated.fleet({"a2": 2, "a3": 2})
    wishes = [request(f"e{i}", tp, dp) for i, (tp, dp) in enumerate(sizes)]
    taken: set[tuple[str, int]] = set()
    for plan in planner.plan_all(fleet, planner.idle(fleet), wishes, looks=0).values():
        if isinstance(plan, Plan):
            bases = hccl_bases(plan.bundles)
            assert bases.keys() == {bundle.node_id for bundle in plan.bundles}
            for node_id, base in bases.items():
                block = {(node_id, port) for port in range(base, base + HCCL_BLOCK)}
                assert not block & taken
                taken |= block
    assert all(60_999 < port < 65_536 for _, port in taken)


def test_npus_that_ray_chooses_leave_hccls_ports_alone() -> None:
    assert hccl_bases([planner.Bundle(rank=0, node_id="n")]) == {}


def test_settings_of_a_host() -> None:
    found = worker_launch.environment("10.0.0.3", "eth1", "61016")
    assert found == {
        "HCCL_IF_IP": "10.0.0.3",
        "HCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
        "HCCL_IF_BASE_PORT": "61016",
    }
    assert worker_launch.environment("127.0.0.1", "lo", "61000") == {"HCCL_IF_BASE_PORT": "61000"}
    assert worker_launch.environment("10.0.0.3", "", None) == {}


def test_the_interface_of_an_address() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert worker_launch.interface_of(entry.address) == name
    assert worker_launch.interface_of("203.0.113.9") == ""


def test_it_becomes_the_worker_and_leaves_what_the_node_says() -> None:
    show = "import os, sys; print(os.environ['HCCL_IF_BASE_PORT'], os.environ['HCCL_IF_IP'], sys.argv[1:])"
    address = next(
        (e.address for es in psutil.net_if_addrs().values() for e in es
         if e.family == socket.AF_INET and not e.address.startswith("127.")), None,
    )  # fmt: skip
    if address is None:
        pytest.skip("this machine has no address but loopback")
    command = worker_launch.command(sys.executable, {address: 61032, "10.9.9.9": 61000}).split()
    told = {**os.environ, "HCCL_IF_IP": "10.1.1.1"}
    told.pop("HCCL_IF_BASE_PORT", None)
    done = subprocess.run(
        [*command, "-c", show, f"--node-ip-address={address}", "--", "x"],
        capture_output=True,
        text=True,
        env=told,
        check=True,
    )
    assert done.stdout.strip() == f"61032 10.1.1.1 ['--node-ip-address={address}', '--', 'x']"


def nodes(kind: str, **told: object) -> Topology:
    addresses = {i: f"192.168.1.{i}" for i in range(16)}
    made = [
        simulated.server(kind, f"n{i}", address=f"10.0.0.{i}", addresses=addresses, **told) for i in range(2)
    ]
    return Topology(nodes=tuple(made))


def test_the_rank_table_of_a2() -> None:
    fleet = nodes("a2")
    plan = planner.plan(fleet, planner.idle(fleet), request("e", 8, 2))
    table = rank_table(plan, {node.node_id: node for node in fleet.nodes})
    assert (table["version"], table["server_count"], "super_pod_list" in table) == ("1.0", "2", False)
    devices = [device for server in table["server_list"] for device in server["device"]]
    assert [device["rank_id"] for device in devices] == [str(i) for i in range(16)]
    assert devices[9] == {
        "device_id": "1", "device_ip": "192.168.1.1", "device_port": "16666", "rank_id": "9",
    }  # fmt: skip


def test_the_rank_table_of_a_super_pod() -> None:
    fleet = nodes("a3", super_pod="7")
    plan = planner.plan(fleet, planner.idle(fleet), request("e", 16, 2))
    table = rank_table(plan, {node.node_id: node for node in fleet.nodes})
    assert table["version"] == "1.2"
    servers = [{"server_id": "10.0.0.0"}, {"server_id": "10.0.0.1"}]
    assert table["super_pod_list"] == [{"super_pod_id": "7", "server_list": servers}]
    assert table["server_list"][1]["host_ip"] == "10.0.0.1"


def test_a_rank_table_needs_addresses() -> None:
    fleet = Topology(nodes=(simulated.server("a2", "n0"),))
    plan = planner.plan(fleet, planner.idle(fleet), request("e", 2))
    with pytest.raises(ValueError, match="the RoCE address of NPU 0 of n0 is not known"):
        rank_table(plan, {"n0": fleet.nodes[0]})


def test_a_worker_writes_the_table_that_its_engine_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    fleet = nodes("a2")
    plan = planner.plan(fleet, planner.idle(fleet), request("e", 2))
    told = [
        {"NodeID": n.node_id, "NodeManagerAddress": n.address, "Alive": True, "Labels": labels.to_labels(n),
         "Resources": labels.resources(n)} for n in fleet.nodes
    ]  # fmt: skip
    monkeypatch.setattr(ray, "nodes", lambda: told)
    model = config.ModelConfig(name="m", source="/m", rank_table=True)
    assert build._rank_table(replace(model, rank_table=False), plan) == {}
    variables = build._rank_table(model, plan)
    program = "import os, sys; path = os.environ['RANK_TABLE_FILE']; print(path); print(open(path).read())"
    done = [
        subprocess.run(
            [*worker_launch.command(sys.executable, {}).split(), "-c", program],
            capture_output=True, text=True, env={**os.environ, **variables, env.HOME: str(tmp_path)}, check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]  # fmt: skip
    assert done[0] == done[1], "workers of one engine share the file"
    assert json.loads(done[0][1]) == rank_table(plan, {node.node_id: node for node in fleet.nodes})
    assert [path.name for path in (tmp_path / "rank-tables").iterdir()] == [Path(done[0][0]).name]
    blind = replace(plan, bundles=tuple(replace(bundle, npu=None) for bundle in plan.bundles))
    with pytest.raises(ValueError, match="a rank table needs nodes that tell their NPUs"):
        build._rank_table(model, blind)


def test_a_failed_start_explains_hccls_code() -> None:
    cause = Cause.of(RuntimeError("HCCL function error: HcclAllReduce, error code is EI0006: timeout"))
    assert "EI0006: a rank did not answer when the group connected; see that every rank started" in cause.text
