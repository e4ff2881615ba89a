"""The ways from a client to the engines: how each is started, and how a client speaks to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.router.mock_engine import MODEL

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".bench"
LOGS = ENVIRONMENTS / "logs"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Where a mock engine listens."""

    grpc: str
    http: str
    core: str  # a folder


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way. ``command`` may name ``{port}``, ``{metrics}`` and ``{tokenizer}``; ``each`` is repeated per engine."""

    name: str
    speaks: str  # grpc | http: what the client speaks
    package: str = ""  # a requirement to install into an environment of its own
    command: str = ""
    each: str = ""  # with {grpc}, {http} or {core}
    engines: int = 2
    environment: dict[str, str] = field(default_factory=dict)


_ROUTER = f"-m npufleet.cluster.router --model {MODEL} --port {{port}} --policy round-robin"
_GATEWAY = f"-m npufleet.cluster.gateway --model {MODEL} --policy round-robin"
_OTHER = "--host 127.0.0.1 --port {port} --policy round_robin --prometheus-port {metrics}"
WAYS = (
    Way(name="direct gRPC", speaks="grpc"),
    Way(name="npufleet router", speaks="grpc", command=_ROUTER, each="--engine {grpc}"),
    Way(
        name="npufleet router, own server",
        speaks="grpc",
        command=f"{_ROUTER} --data-plane http2",
        each="--engine {grpc}",
    ),
    Way(
        name="npufleet router behind Envoy",
        speaks="grpc",
        command=f"{_ROUTER} --data-plane envoy",
        each="--engine {grpc}",
    ),
    Way(
        name="Envoy asking over ext_proc",
        speaks="grpc",
        command=f"{_ROUTER} --data-plane envoy --envoy-filter ext_proc",
        each="--engine {grpc}",
    ),
    Way(
        name="npufleet router, grpcio transport",
        speaks="grpc",
        command=f"{_ROUTER} --transport grpcio",
        each="--engine {grpc}",
    ),
    Way(name="direct HTTP", speaks="http"),
    Way(
        name="npufleet gateway",
        speaks="http",
        command=_GATEWAY + ' --set {{"port":{port}}}',
        each="--engine {grpc}",
        environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    Way(
        name="npufleet gateway, grpcio transport",
        speaks="http",
        command=_GATEWAY + ' --transport grpcio --set {{"port":{port}}}',
        each="--engine {grpc}",
        environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    Way(
        name="vLLM's API server alone",
        speaks="http",
        command="-m benchmarks.router.plain_server {tokenizer} {port}",
        each="{core}",
        engines=1,
    ),
    Way(
        name="smg 1.13.0",
        speaks="http",
        package="smg==1.13.0",
        command=f"smg launch {_OTHER} --model-path {{tokenizer}} --log-level warn --worker-urls",
        each="grpc://{grpc}",
    ),
    Way(
        name="vllm-router 0.1.17",
        speaks="http",
        package="vllm-router==0.1.17",
        command=f"vllm-router {_OTHER} --worker-urls",
        each="http://{http}",
    ),
    Way(
        name="sglang-router 0.3.2",
        speaks="http",
        package="sglang-router==0.3.2",
        command=f"sglang-router launch {_OTHER} --worker-urls",
        each="http://{http}",
    ),
)


def free_port() -> int:
    """A port of loopback that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment_of(package: str) -> Path:
    """The folder of programs of an environment with ``package``, made where it is not there yet."""
    home = ENVIRONMENTS / package.replace("==", "-")
    if not (home / ".complete").exists():
        print(f"installing {package} into {home.relative_to(ROOT)}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", package]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        (home / ".complete").touch()
    return home / "bin"


def start(
    path: Way, engines: Sequence[Engine], tokenizer: Path
) -> tuple[subprocess.Popen[bytes] | None, str]:
    """The process of ``path`` over ``engines`` and its address; a direct way has no process."""
    if not path.command:
        return None, getattr(engines[0], path.speaks)
    port = free_port()
    values = {"port": port, "metrics": free_port(), "tokenizer": tokenizer}
    command = [word.format(**values) for word in path.command.split()]
    own = engines[: path.engines]
    command += [word.format(grpc=e.grpc, http=e.http, core=e.core) for e in own for word in path.each.split()]
    program = [sys.executable, *command]
    if path.package:
        folder = environment_of(path.package)
        program = [str(folder / command[0]), *command[1:]]
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(LOGS / f"{path.name.replace(' ', '-')}.log", "wb") as log:
        process = subprocess.Popen(
            program, stdout=log, stderr=log, env={**os.environ, **path.environment}, start_new_session=True
        )
    return process, f"127.0.0.1:{port}"
