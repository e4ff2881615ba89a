"""Nodes that are taken away and a head that dies, under load: real Ray nodes, engines without models.

One test, because the hosts take a while to come up: each part needs what the one before has left.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.hosts import RAY, Host, Hosts
from npufleet.cluster import env
from tests.fakes.tokenizer import make_tokenizer_dir

from .fleet import ENGINE, PLAIN, RECOVER_S, START_S, eventually, free_port
from .streams import Stream

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """The fleet on its hosts, and what a user sees of it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.ports = {name: free_port() for name in ("gateway", "router", "metrics")}

    def begin(self, python: str) -> None:
        source = str(make_tokenizer_dir(self.hosts.folder / "tokenizer"))
        engine = {"kv_cache_memory_bytes": 1 << 20, "seed": 3}
        models = [{"name": "alpha", "source": source, "engines": 2, "engine": engine}]
        fleet = {"name": "nodes", "device": "virtual", "models": models}
        fleet |= {name: {"port": port} for name, port in self.ports.items()}
        path = self.hosts.folder / "fleet.json"
        path.write_text(json.dumps(fleet))
        subprocess.run(
            [python, "-m", "tests.e2e.hollow", "join", self.hosts.address, path], check=True, cwd=ROOT
        )

    def status(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = httpx.get(
                f"http://127.0.0.1:{self.ports['metrics']}/status", timeout=30, verify=PLAIN
            ).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return answer

    def homes(self) -> dict[str, str]:
        """Ready engines and the address of the host whose NPU they have."""
        told = self.status()
        nodes = {node["node_id"]: node["address"] for node in told.get("nodes", ())}
        return {
            engine["engine_id"]: nodes.get(engine["places"][0].rpartition(":")[0], "")
            for engine in told.get("engines", ())
            if engine["state"] == "ready"
        }

    def two_ready(self) -> dict[str, str]:
        """The engines if there are two, all ready, else nothing."""
        found = self.homes()
        return found if len(found) == 2 == len(self.status().get("engines", ())) else {}

    def drain(self, host: Host) -> None:
        """As the autoscaler does before it takes a node away."""
        nodes = {node["address"]: node["node_id"] for node in self.status()["nodes"]}
        command = [*RAY, "drain-node", "--address", self.hosts.address, "--node-id", nodes[host.address]]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
        subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True, timeout=120)


def test_nodes_leave_and_the_head_dies_and_nobody_notices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the engines are a module of the tests
    monkeypatch.setenv(env.HOME, str(tmp_path))
    front = Host(name="front", address="127.0.0.2")
    left, right = (Host(name=f"host-{n}", address=f"127.0.0.{n}", npus=2) for n in (3, 4))
    with Hosts(hosts=[front]) as hosts:
        cluster = Cluster(hosts)
        cluster.begin(RAY[0])
        eventually("the front end is up", START_S, cluster.status)
        for host in (left, right):  # so late that all processes of the fleet are elsewhere
            hosts.hosts.append(host)
            hosts.start(host)
        before = eventually("both engines are ready", START_S, cluster.two_ready)
        told = [entry["phase"] for entry in cluster.status()["progress"]]
        assert set(told) == {"ready"}, "an engine that waits for the first node has not failed"
        streams = [Stream(cluster.ports["router"], "alpha") for _ in range(4)]

        stays, leaves = (left, right) if right.address in before.values() else (right, left)
        cluster.drain(leaves)
        eventually(
            "no engine is left there", RECOVER_S, lambda: set(cluster.two_ready().values()) == {stays.address}
        )
        there = cluster.status()["nodes"]  # Ray itself ends a drained node as soon as nothing is left on it
        for node in there:
            if node["address"] == leaves.address:
                assert (node["closed"], node["reserved"]) == ("leaving", 0)
        hosts.kill(leaves)

        answered = sum(sum(stream.seeds.values()) for stream in streams)
        hosts.kill(hosts.head)
        eventually("the status says so", RECOVER_S, lambda: cluster.status().get("head_silent_s"))
        time.sleep(10.0)
        served = sum(sum(stream.seeds.values()) for stream in streams) - answered
        assert served > 0 and cluster.two_ready(), "serving goes on"
        hosts.start(hosts.head)
        eventually("the head is back", RECOVER_S, lambda: cluster.status().get("head_silent_s") == 0)
        for stream in streams:
            stream.stop()
        assert [text for stream in streams for text in stream.failed] == []

        survivors = set(cluster.two_ready())
        everybody = [process for host in (front, stays) for process in host.family]
        victim = next(process for process in everybody if ENGINE in " ".join(process.cmdline()))
        victim.kill()
        psutil.wait_procs([victim], timeout=60)
        eventually("a new engine in its stead", RECOVER_S, lambda: set(cluster.two_ready()) - survivors)
    assert not [p for p in psutil.process_iter() if str(hosts.folder) in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.pid != os.getpid() else []
    except psutil.Error:
        return []
