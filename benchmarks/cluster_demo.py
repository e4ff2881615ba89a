"""Three simulated hosts, two models, engines placed by the rules: `make cluster-demo`.

Brings up a head and three hosts of four NPUs, each in a network namespace of its own where that is permitted, begins a
fleet on them with `npufleet deploy`, shows `npufleet status` as text and as JSON, asks both models, empties a host with
`npufleet drain`, shows the status again, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import namespaces
from benchmarks.hosts import Host, Hosts, free_port
from npufleet.cluster import ask, demo_model

ENGINE = {
    "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}  # fmt: skip
DOOR_S, SETTLE_S = 60.0, 600.0
ENGINES = 2
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def fleet(folder: Path, host: str) -> tuple[Path, dict[str, int]]:
    """Write the FleetConfig: a model whose engine is split over three NPUs by tensor parallelism, and one whose engine
    is two data-parallel ranks.
    """
    source = str(demo_model.ensure(lambda done, total: None))
    ports = {name: free_port() for name in ("gateway", "router", "metrics")}
    models = [
        {"name": "large", "source": source, "engines": 1, "engine": {**ENGINE, "tensor_parallel_size": 3}},
        {"name": "small", "source": source, "engines": 1, "engine": {**ENGINE, "data_parallel_size": 2}},
    ]
    data: dict[str, Any] = {"name": "cluster-demo", "device": "virtual", "models": models}
    data |= {name: {"host": host, "port": port} for name, port in ports.items()}
    path = folder / "cluster-demo.yaml"
    path.write_text(json.dumps(data, indent=2))  # JSON is YAML
    return path, ports


def npufleet(cluster: Hosts, *arguments: str, show: bool = True) -> str:
    """Run a command of npufleet on the head, show it, and return what it printed.

    Raises:
        RuntimeError: if it failed.
    """
    print(f"$ npufleet {' '.join(arguments)}", flush=True)
    command = cluster.on_head([sys.executable, "-m", "npufleet.cluster.cli", *arguments])
    printed: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if show:
                print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"npufleet {arguments[0]} ended with {process.returncode}")
    return "".join(printed)


def main() -> int:
    """Run; returns 0 if both models answered rightly and sat by the rules, before and after a host was emptied."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", action="store_true", help="wait for Enter before everything ends")
    parser.add_argument("--raylets", action="store_true", help="no network namespaces, even where permitted")
    args = parser.parse_args()
    hosts = [Host(name=f"host-{n}", address=f"127.0.0.{n + 1}", npus=4) for n in (1, 2, 3)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the hosts are to end with this process
    apart = not args.raylets and namespaces.permitted()
    print(
        f"three hosts as {'network namespaces' if apart else 'raylets on addresses of 127.0.0.0/8'}",
        flush=True,
    )
    with Hosts(hosts=hosts, apart=apart) as cluster:
        path, ports = fleet(cluster.folder, "0.0.0.0" if apart else "127.0.0.1")
        npufleet(cluster, "deploy", str(path), "--address", cluster.address, "--yes")
        url, right = look(cluster, ports, apart)
        leave = small_host(url)
        npufleet(cluster, "drain", leave, "--address", cluster.address)
        settle(url)
        url, right_again = look(cluster, ports, apart)
        assert small_host(url) != leave, f"the engine of 'small' still sits on {leave}"
        if args.keep:
            input("Enter ends it ")
    return 0 if right and right_again else 1


def look(cluster: Hosts, ports: dict[str, int], apart: bool) -> tuple[str, bool]:
    """Show the fleet and ask it; return the controller's URL and whether all is as it should be."""
    url = f"http://{door(cluster, ports['metrics'], apart)}"
    npufleet(cluster, "status", "--url", url)
    told = json.loads(npufleet(cluster, "status", "--url", url, "--json", show=False))
    fine = placed_by_the_rules(told)
    print(f"{len(told['engines'])} engines, placed by the rules: {'yes' if fine else 'NO'}", flush=True)
    return url, answers(f"http://{door(cluster, ports['gateway'], apart)}") and fine


def settle(url: str) -> None:
    """Wait until every model has its engines: one that left is followed by another, which may be one too many."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        told = ask.get_json(url, "/status")
        if all(m["ready"] == m["wanted"] for m in told["models"]) and len(told["engines"]) == ENGINES:
            return
        time.sleep(1.0)
    raise TimeoutError(f"the fleet has not settled within {SETTLE_S:.0f} s")


def door(cluster: Hosts, port: int, apart: bool) -> str:
    """Return where a port of the fleet is open: on whichever host Ray put its process."""
    if not apart:
        return f"127.0.0.1:{port}"
    deadline = time.monotonic() + DOOR_S
    while time.monotonic() < deadline:
        for host in cluster.hosts:
            with contextlib.suppress(OSError), socket.create_connection((host.address, port), timeout=2.0):
                return f"{host.address}:{port}"
        time.sleep(1.0)
    raise TimeoutError(f"no host listens on port {port}")


def placed_by_the_rules(told: dict[str, Any]) -> bool:
    """Say whether each engine has as many NPUs as it asked for, its tensor-parallel group on one host, and no NPU
    serves two.
    """
    places = [place for engine in told["engines"] for place in engine["places"]]
    homes = {e["model"]: {place.rpartition(":")[0] for place in e["places"]} for e in told["engines"]}
    sizes = {engine["model"]: len(engine["places"]) for engine in told["engines"]}
    return len(set(places)) == len(places) and len(homes["large"]) == 1 and sizes == {"large": 3, "small": 2}


def small_host(url: str) -> str:
    """Return the address of a host with an engine of the small model."""
    status = ask.get_json(url, "/status")
    nodes = {node["node_id"]: node["address"] for node in status["nodes"]}
    engine = next(engine for engine in status["engines"] if engine["model"] == "small")
    return str(nodes[engine["places"][0].rpartition(":")[0]])


def answers(url: str) -> bool:
    """Ask both models; say whether both knew."""
    known = True
    for model in ("large", "small"):
        said = ask.chat(url, model, QUESTION)
        print(f"{model}: {QUESTION} {said.strip()}", flush=True)
        known &= ANSWER in said
    return known


if __name__ == "__main__":
    sys.exit(main())
