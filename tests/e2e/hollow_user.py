"""What a user does with a fleet without models (:mod:`tests.e2e.hollow`): start it, change it, look at it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from npufleet.cluster import env
from tests.fakes.tokenizer import make_tokenizer_dir

from .fleet import START_S, eventually, free_port


class HollowUser:
    """The fleet, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("gateway", "router", "metrics")}
        self.source = str(make_tokenizer_dir(folder / "tokenizer"))
        self.environment = {**os.environ, env.HOME: str(folder / "home")}
        self.process: subprocess.Popen[bytes] | None = None

    def config(self, *models: dict[str, Any], **more: Any) -> Path:
        fleet: dict[str, Any] = {"name": "hollow", "device": "virtual", "models": list(models), **more}
        fleet |= {name: {**fleet.get(name, {}), "port": port} for name, port in self.ports.items()}
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
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def stop(self) -> None:
        """As Ctrl-C does, and then with force."""
        if self.process is None or self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in family:
            if process.is_running():
                process.kill()
