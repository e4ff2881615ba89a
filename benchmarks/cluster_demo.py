"""Three simulated hosts, two models, engines placed by the rules: `make cluster-demo`.

Brings up a head and three hosts of four NPUs, begins a fleet on them with `npufleet deploy`,
shows `npufleet status`, asks both models, empties a host with `npufleet drain`, shows the status again, and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, Hosts, free_port
from npufleet.cluster import ask, demo_model

ENGINE = {
    "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}  # fmt: skip
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def fleet(folder: Path) -> tuple[Path, dict[str, int]]:
    """Write the FleetConfig: one model split over two NPUs, one that fits on one."""
    source = str(demo_model.ensure(lambda done, total: None))
    ports = {name: free_port() for name in ("gateway", "router", "metrics")}
    models = [
        {"name": "large", "source": source, "engines": 1, "engine": {**ENGINE, "tensor_parallel_size": 3}},
        {"name": "small", "source": source, "engines": 2, "engine": ENGINE},
    ]
    data: dict[str, Any] = {"name": "cluster-demo", "device": "virtual", "models": models}
    data |= {name: {"port": port} for name, port in ports.items()}
    path = folder / "cluster-demo.yaml"
    path.write_text(json.dumps(data, indent=2))  # JSON is YAML
    return path, ports


def npufleet(*arguments: str) -> None:
    """Run a command of npufleet and show it."""
    print(f"$ npufleet {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "npufleet.cluster.cli", *arguments], timeout=900)


def main() -> int:
    """Run; returns 0 if both models answered rightly, before and after a host was emptied."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", action="store_true", help="wait for Enter before everything ends")
    args = parser.parse_args()
    hosts = [Host(name=f"host-{n}", address=f"127.0.0.{n + 1}", npus=4) for n in (1, 2, 3)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the hosts are to end with this process
    right = True
    with Hosts(hosts=hosts) as cluster:
        path, ports = fleet(cluster.folder)
        url = f"http://127.0.0.1:{ports['metrics']}"
        npufleet("deploy", str(path), "--address", cluster.address, "--yes")
        npufleet("status", "--url", url)
        right &= answers(ports["gateway"])
        npufleet("drain", small_host(url), "--address", cluster.address)
        npufleet("status", "--url", url)
        right &= answers(ports["gateway"])
        if args.keep:
            input("Enter ends it ")
    return 0 if right else 1


def small_host(url: str) -> str:
    """Return the address of a host with an engine of the small model."""
    status = ask.get_json(url, "/status")
    nodes = {node["node_id"]: node["address"] for node in status["nodes"]}
    engine = next(engine for engine in status["engines"] if engine["model"] == "small")
    return str(nodes[engine["places"][0].rpartition(":")[0]])


def answers(port: int) -> bool:
    """Ask both models; say whether both knew."""
    known = True
    for model in ("large", "small"):
        said = ask.chat(f"http://127.0.0.1:{port}", model, QUESTION)
        print(f"{model}: {QUESTION} {said.strip()}", flush=True)
        known &= ANSWER in said
    return known


if __name__ == "__main__":
    sys.exit(main())
