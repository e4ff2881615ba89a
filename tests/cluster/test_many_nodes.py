"""Several raylets on one machine as a fleet: what Ray tells, groups on planned NPUs, doctor and preflight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npufleet.cluster import config, preflight_cluster
from npufleet.cluster.controller.placer import Placer
from npufleet.cluster.controller.progress import ProgressBoard
from npufleet.cluster.controller.registry import Registry
from npufleet.cluster.doctor import nodes
from npufleet.cluster.doctor.finding import Level
from npufleet.cluster.placement import group, planner, ray_state
from npufleet.cluster.placement.plan import NoRoom, Request
from npufleet.cluster.topology import labels, simulated

pytestmark = pytest.mark.slow

FLEET = {
    "pod0": simulated.server("a3", "pod0", super_pod="0", failure_domain="rack-0"),
    "pod1": simulated.server("a3", "pod1", super_pod="1", failure_domain="rack-1", unhealthy=(3,)),
    "eight": simulated.server("a2", "eight", failure_domain="rack-0"),
}
ENVIRONMENT = {"NPUFLEET_DEVICE": "virtual:16:Ascend910_9391,hbm=2GiB", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for name, node in FLEET.items():
            made.add_node(
                num_cpus=1,
                resources=labels.resources(node),
                labels={**labels.to_labels(node), "test-name": name},
            )
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def ids(cluster: Any) -> dict[str, str]:
    import ray

    return {
        entry["Labels"]["test-name"]: entry["NodeID"]
        for entry in ray.nodes()
        if "test-name" in entry["Labels"]
    }


def request(tp: int, dp: int = 1, engine: str = "e", **more: Any) -> Request:
    return Request(engine_id=engine, model="m", tensor_parallel_size=tp, data_parallel_size=dp, **more)


def make(plan: planner.Plan) -> Any:
    return asyncio.run(group.create(plan, 60.0))


def test_ray_tells_what_the_nodes_have(cluster: Any) -> None:
    found = {node.node_id: node for node in ray_state.read().topology.nodes}
    names = ids(cluster)
    assert len(found) == 4  # the head has no NPU
    for name, node in FLEET.items():
        told = found[names[name]]
        assert told.exact
        assert replace(told, node_id=name, address="", labels={}) == replace(node, labels={})


def test_groups_sit_on_the_planned_npus_and_a_new_controller_knows_it(cluster: Any) -> None:
    names = ids(cluster)
    state = ray_state.read()
    plan = planner.plan(state.topology, state.free(), request(4, dp=3, expert_parallel=True))
    (home,) = {bundle.node_id for bundle in plan.bundles}
    assert home in (names["pod0"], names["pod1"]) and len(plan.bundles) == 12, "experts stay in one super-pod"
    made = make(plan)
    try:
        after = ray_state.read()
        assert {(b.node_id, b.npu) for b in after.groups["e"]} == {(b.node_id, b.npu) for b in plan.bundles}
        assert after.created == {"e"}
        settings = {"name": "m", "source": "/m", "engine": {"tensor_parallel_size": 8}, "engines": 2}
        fresh = Placer(
            config=config.from_dict({"device": "virtual", "models": [settings]}),
            registry=Registry(),
            progress=ProgressBoard(),
        )
        answer = fresh.place(after, "f", "m")
        assert not {*zip(answer["nodes"], answer["npus"], strict=True)} & {
            (bundle.node_id, bundle.npu) for bundle in plan.bundles
        }
        with pytest.raises(group.PlacementTimeout, match="something outside the fleet may hold them"):
            asyncio.run(group.create(replace(plan, engine_id="thief"), 3.0))
    finally:
        group.remove(made)
    assert "thief" not in ray_state.read().groups


def test_sick_npus_and_super_pods_bound_what_fits(cluster: Any) -> None:
    state = ray_state.read()
    with pytest.raises(NoRoom, match="its experts must share one super-pod"):
        planner.plan(state.topology, state.free(), request(4, dp=7, expert_parallel=True))
    plan = planner.plan(state.topology, state.free(), request(14))
    assert {bundle.npu for bundle in plan.bundles if bundle.node_id == ids(cluster)["pod1"]} <= {
        *range(16)
    } - {2, 3}


def test_doctor_asks_every_node_and_lets_npus_meet(cluster: Any, tmp_path: Path) -> None:
    told = list(nodes.examine("all", [("m", str(tmp_path))]))
    by_name: dict[str, list[Level]] = {}
    for _, finding in told:
        by_name.setdefault(finding.name, []).append(finding.level)
    assert len(by_name["python"]) == 4
    assert by_name["clock"] == [Level.OK] * 4
    assert by_name["model m"] == [Level.FAIL] * 3  # on the nodes with NPUs
    assert Level.FAIL in by_name["NPUs in Ray"]  # the raylets pretend; each node has 16 virtual ones
    (meeting,) = (finding for _, finding in told if finding.name == "HCCL all-reduce")
    assert meeting.level is Level.OK, meeting
    assert meeting.text.startswith("3 ranks in ")


def fleet(tmp_path: Path, **model: Any) -> config.FleetConfig:
    made = {"name": "m", "source": str(tmp_path), **model}
    return config.from_dict({"device": "virtual", "models": [made], "metrics": {"port": free_port()}})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_what_a_cluster_cannot_serve_is_refused_before_anything_starts(cluster: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=r"in one HCCS domain"):
        preflight_cluster.check(fleet(tmp_path, engine={"tensor_parallel_size": 15}), "app", said.append)
    with pytest.raises(ValueError, match=r"engines find no room even if nothing else runs: 9 x 8 for m"):
        preflight_cluster.check(
            fleet(tmp_path, engine={"tensor_parallel_size": 8}, engines=9), "app", said.append
        )
    with pytest.raises(ValueError, match="needs 1 Ascend310P3"):
        preflight_cluster.check(fleet(tmp_path, chip="Ascend310P3"), "app", said.append)
    with pytest.raises(ValueError, match=r"config.json does not exist on this node; copy or mount"):
        preflight_cluster.check(fleet(tmp_path), "app", said.append)
    said.clear()  # nodes that no engine would come to may have been looked at before
    (tmp_path / "config.json").write_text("{}")
    preflight_cluster.check(fleet(tmp_path), "app", said.append)
    assert said == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        wish = replace(fleet(tmp_path), gateway=config.GatewayConfig(port=number))
        with pytest.raises(ValueError, match=f"gateway cannot listen on 127.0.0.1:{number}"):
            preflight_cluster.check(wish, "app", said.append)


def test_two_engines_serve_on_two_racks(cluster: Any) -> None:
    """The whole way: `npufleet serve` on this cluster, an answer, and nothing left behind."""
    names = ids(cluster)
    command = [
        sys.executable, "-m", "npufleet.cluster.cli", "serve", "demo", "--once", "--address", cluster.address,
        "--device", "virtual",
    ]  # fmt: skip
    command += [part for door in ("", "grpc-", "metrics-") for part in (f"--{door}port", str(free_port()))]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    homes: set[str] = set()
    with contextlib.suppress(subprocess.TimeoutExpired):
        for _ in range(150):
            for name, bundles in ray_state.read().groups.items():
                if "SmolLM2" in name:
                    homes |= {bundle.node_id for bundle in bundles}
            done.wait(timeout=2.0)
            break
    while done.poll() is None:
        for name, bundles in ray_state.read().groups.items():
            if "SmolLM2" in name:
                homes |= {bundle.node_id for bundle in bundles}
        with contextlib.suppress(subprocess.TimeoutExpired):
            done.wait(timeout=2.0)
    output = done.stdout.read() if done.stdout else ""
    assert done.returncode == 0, output
    assert "Paris" in output
    racks = {FLEET[name].fails_with for name, node_id in names.items() if node_id in homes}
    assert racks == {"rack-0", "rack-1"}
    assert ray_state.read().groups == {}
