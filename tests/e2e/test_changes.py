"""A running fleet is changed under load: real Ray, Serve, controller, router and gateway over engines without models.

One test, because the fleet takes half a minute to come up: each part needs what the one before has left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from npufleet.cluster import env
from tests.fakes.tokenizer import make_tokenizer_dir

from .fleet import START_S, eventually, free_port
from .hollow import REFUSED
from .streams import Stream

pytestmark = pytest.mark.slow


class Hollow:
    """The fleet, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("gateway", "router", "metrics")}
        self.source = str(make_tokenizer_dir(folder / "tokenizer"))
        self.environment = {**os.environ, env.HOME: str(folder / "home")}
        self.process: subprocess.Popen[bytes] | None = None

    def config(self, *models: dict[str, Any]) -> Path:
        fleet: dict[str, Any] = {"name": "hollow", "device": "virtual", "models": list(models)}
        fleet |= {name: {"port": port} for name, port in self.ports.items()}
        path = self.folder / "fleet.yaml"
        path.write_text(json.dumps(fleet))
        return path

    def model(self, name: str, engines: int, **engine: Any) -> dict[str, Any]:
        engine = {"kv_cache_memory_bytes": 1 << 20, **engine}  # otherwise `deploy` sizes it
        return {"name": name, "source": self.source, "engines": engines, "engine": engine}

    def start(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.e2e.hollow", str(self.folder), str(path)]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        eventually("the fleet is up", START_S, (self.folder / "ready").exists)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "npufleet.cluster.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=self.environment)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(
            f"http://127.0.0.1:{self.ports['metrics']}/status", timeout=10
        ).json()
        return answer

    def engines(self, model: str) -> set[str]:
        return {e["engine_id"] for e in self.status()["engines"] if e["model"] == model}

    def processes(self, title: str) -> list[psutil.Process]:
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if title in " ".join(process.cmdline())]


@pytest.fixture
def hollow(tmp_path: Path) -> Iterator[Hollow]:
    made = Hollow(tmp_path)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            family = psutil.Process(made.process.pid).children(recursive=True)
            made.process.send_signal(signal.SIGINT)
            try:
                made.process.wait(90)
            except subprocess.TimeoutExpired:
                made.process.kill()
            for process in family:
                if process.is_running():
                    process.kill()


def test_a_fleet_changes_under_load_and_nobody_notices(hollow: Hollow) -> None:
    hollow.start(hollow.config(hollow.model("alpha", 2, seed=0)))
    streams = [Stream(hollow.ports["router"], "alpha") for _ in range(4)]
    first = hollow.engines("alpha")
    controller, front = hollow.processes("Controller"), hollow.processes("Router")

    told = hollow.run("scale", "alpha", "3", "--yes")
    assert told.returncode == 0, told
    assert len(hollow.engines("alpha")) == 3 and first < hollow.engines("alpha")

    rolled = hollow.config(hollow.model("alpha", 2, seed=7), hollow.model("beta", 1))
    told = hollow.run("deploy", str(rolled), "--dry-run")
    assert "roll     alpha: seed 0 -> 7" in told.stdout and "add      beta" in told.stdout, told
    assert hollow.engines("alpha") >= first, "a dry run changes nothing"
    told = hollow.run("deploy", str(rolled), "--yes")
    assert told.returncode == 0, told
    assert not hollow.engines("alpha") & first and len(hollow.engines("alpha")) == 2
    assert (
        httpx.get(f"http://127.0.0.1:{hollow.ports['gateway']}/v1/models").json()["data"][1]["id"] == "beta"
    )

    present = hollow.engines("alpha")
    bad = hollow.config(hollow.model("alpha", 2, seed=7, max_num_seqs=REFUSED), hollow.model("beta", 1))
    told = hollow.run("deploy", str(bad), "--yes")
    assert told.returncode == 1 and "13 sequences bring no luck" in told.stdout, told
    assert hollow.status()["change"]["state"] == "rolled back"
    assert hollow.engines("alpha") == present, "nothing of what ran was touched"

    told = hollow.run("deploy", str(hollow.config(hollow.model("alpha", 2, seed=7))), "--yes")
    assert told.returncode == 0, told
    assert hollow.engines("beta") == set()
    for stream in streams:
        stream.stop()
    assert [text for stream in streams for text in stream.failed] == []
    assert all(stream.seeds.keys() == {0, 7} for stream in streams), [stream.seeds for stream in streams]
    assert hollow.processes("Controller") == controller and hollow.processes("Router") == front
