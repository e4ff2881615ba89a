"""Fake engines in a thread, and one gateway over them in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

from .engine import FakeEngine, Script
from .tokenizer import make_tokenizer_dir

T = TypeVar("T")
START_S = 180.0
READY_S = 60.0


class EngineThread:
    """An event loop in a thread, in which fake engines run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake engines", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` there and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)


def wait_until(true: Callable[[], bool], what: str, seconds: float = READY_S) -> None:
    """Wait for a condition; AssertionError naming it when it does not come."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


class Fleet:
    """Two engines of model "alpha", one stock engine of model "beta", and a gateway."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="npufleet-test-")
        self.tokenizer_dir = make_tokenizer_dir(Path(self._directory.name) / "tokenizer")
        self._thread = EngineThread()
        self.alpha = [FakeEngine(self.tokenizer_dir, model="alpha") for _ in range(2)]
        self.beta = FakeEngine(self.tokenizer_dir, model="beta", stock=True)
        for engine in self.engines:
            self._thread.call(engine.start())
        self._log = open(Path(self._directory.name) / "gateway.log", "w+")  # noqa: SIM115 - lives as long as self
        self._gateway = self._start_gateway()
        self.url = self._read_url()

    @property
    def engines(self) -> list[FakeEngine]:
        """All fake engines."""
        return [*self.alpha, self.beta]

    def _start_gateway(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "npufleet.cluster.gateway"]
        for engine in self.engines:
            command += ["--engine", f"{engine.model}@{engine.address}"]
        settings = {
            "port": 0,
            "token_gap_timeout": 2.0,
            "first_token_timeout": 4.0,
            "max_body_bytes": 4 << 20,
        }
        command += ["--set", json.dumps(settings)]
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        return subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def log(self) -> str:
        """What the gateway has written so far."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def _read_url(self) -> str:
        def listening() -> bool:
            assert self._gateway.poll() is None, self.log()
            return "gateway listens on" in self.log()

        wait_until(listening, "the gateway's port", START_S)
        found = re.search(r"gateway listens on (\S+)", self.log())
        assert found is not None
        return found.group(1)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of the gateway, 0 where it does not exist."""
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def reset(self) -> None:
        """All engines up, scripts and records empty, and the gateway knows."""
        for engine in self.engines:
            engine.script = Script()
            engine.seen.clear()
            engine.aborted.clear()
            if engine._server is None:
                self._thread.call(engine.start(engine.port))
        self.wait_engines(alpha=2, beta=1)

    def wait_engines(self, **wanted: int) -> None:
        """Until the gateway sees so many engines per model that can take a request."""
        for model, number in wanted.items():
            wait_until(
                lambda model=model, number=number: (  # type: ignore[misc]
                    self.metric("npufleet_gateway_engines", model_name=model) == number
                ),
                f"{number} engines of {model}",
                START_S,
            )

    def stop(self, *engines: FakeEngine) -> None:
        """Take engines down at once."""
        for engine in engines:
            self._thread.call(engine.stop())

    def wait_loaded(self) -> None:
        """Until the frontends of both models are built."""
        for model in ("alpha", "beta"):
            body = {"model": model, "prompt": "a"}
            wait_until(
                lambda body=body: (  # type: ignore[misc]
                    httpx.post(f"{self.url}/tokenize", json=body, timeout=60).status_code == 200
                ),
                f"model {model}: {self.log()[-2000:]}",
                START_S,
            )

    def close(self) -> int:
        """End everything; the gateway's exit code."""
        self._gateway.terminate()
        code = self._gateway.wait(timeout=60)
        self.stop(*[engine for engine in self.engines if engine._server is not None])
        self._thread.close()
        self._log.close()
        self._directory.cleanup()
        return code
