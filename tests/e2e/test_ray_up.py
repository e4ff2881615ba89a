"""`ray up` with the files of deploy/ray: three hosts with their own network, processes, home and sshd, on one machine.

Needs root, network namespaces, sshd and rsync (Debian: iproute2, openssh-server, rsync).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from benchmarks import namespaces
from npufleet.cluster import demo_model, env

from .fleet import PLAIN, START_S, eventually

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "ray"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HOME = Path("/root")
NAMES = ("head", "one", "two")
CHIP = "Ascend910B3"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.path.exists(SSHD) or not shutil.which("rsync"), reason="needs sshd and rsync"),
    pytest.mark.skipif(not namespaces.permitted(), reason="needs network namespaces"),
]


def _kept(home: Path) -> list[str]:
    """Commands that put into a server's home what the tests need and this user has at home, Python for example."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT, env.home())}
    inside = [(path, home / path.relative_to(HOME)) for path in needed if path.is_relative_to(HOME)]
    return [f"mkdir -p {there} && mount --rbind {path} {there}" for path, there in sorted(inside)]


class Site:
    """Three servers and the machine of their administrator."""

    def __init__(self, folder: Path, addresses: dict[str, tuple[str, str]]) -> None:
        self.folder = folder
        self.addresses = {name: address for name, (_, address) in addresses.items()}
        self.key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        self.admin = folder / "admin"  # its home
        (self.admin / ".ssh").mkdir(parents=True)
        self.servers = [self._boot(name, space) for name, (space, _) in addresses.items()]
        for address in self.addresses.values():
            eventually(f"sshd of {address}", 60, lambda address=address: _listens(address, 22))
        self.file = self._cluster_file()

    def _boot(self, name: str, space: str) -> subprocess.Popen[bytes]:
        """Start a server: a namespace of processes, a home and a /var/tmp of its own, and sshd."""
        home = self.folder / name
        (home / ".ssh").mkdir(parents=True)
        (home / ".npufleet-venv/bin").mkdir(parents=True)
        shutil.copy(f"{self.key}.pub", home / ".ssh/authorized_keys")
        virtual = f"virtual:2:{CHIP},hbm=16GiB"
        (home / ".npufleet-venv/bin/activate").write_text(
            f"export PATH={Path(sys.executable).parent}:$PATH NPUFLEET_DEVICE={virtual} OMP_NUM_THREADS=1\n"
            f"export {env.HOME}={env.home()} RAY_worker_niceness=0 RAY_TMPDIR=/var/tmp/{name}\n"
        )
        (home / ".bashrc").write_text(". ~/.npufleet-venv/bin/activate\n")
        for host_key in ("rsa", "ed25519"):
            path = self.folder / f"{name}_{host_key}"
            subprocess.run(["ssh-keygen", "-q", "-t", host_key, "-N", "", "-f", path], check=True)
        serve = f"exec {SSHD} -D -e -o UsePAM=no -o StrictModes=no -o PidFile=none -o PermitRootLogin=yes"
        serve += f" -h {self.folder}/{name}_rsa -h {self.folder}/{name}_ed25519"
        own = f"mount --rbind {home} {HOME} && mount -t tmpfs none /var/tmp && mkdir /var/tmp/{name}"
        boot = " && ".join(["mkdir -p /run/sshd", *_kept(home), own, serve])
        inner = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "bash", "-c", boot]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                namespaces.inside(space, inner), stdout=log, stderr=log, start_new_session=True
            )

    def _cluster_file(self) -> Path:
        """deploy/ray/on-prem-a2.yaml as its user fills it in."""
        made = yaml.safe_load((DEPLOY / "on-prem-a2.yaml").read_text())
        workers = [self.addresses[name] for name in NAMES[1:]]
        made["provider"] |= {"head_ip": self.addresses["head"], "worker_ips": workers}
        made["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.key)}
        made |= {"min_workers": len(workers), "max_workers": len(workers)}
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(made))
        return path

    def run(self, *command: str, seconds: float = 600.0) -> str:
        """Run one of Ray's commands as the administrator does, in the repository; returns what it printed."""
        environment = {**os.environ, "HOME": str(self.admin), "RAY_USAGE_STATS_ENABLED": "0"}
        with (self.folder / "commands.log").open("ab+") as log:
            log.write(f"$ ray {' '.join(command)}\n".encode())
            log.flush()
            began = log.tell()
            done = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=ROOT, env=environment, timeout=seconds,
            )  # fmt: skip
            log.seek(began)
            said = log.read().decode(errors="replace")
        assert done.returncode == 0, said
        return said

    def end(self) -> None:
        """Power off."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with namespaces.network(NAMES) as addresses:
        made = Site(tmp_path, addresses)
        try:
            yield made
        finally:
            made.end()


def test_up_deploy_ask_down(site: Site) -> None:
    site.run("get-auth-token", "--generate")
    site.run("up", "-y", "--no-config-cache", str(site.file))
    remote = ("exec", str(site.file))
    on_head = "RAY_AUTH_MODE=token "
    doctor = f"{on_head} npufleet doctor --nodes all --expect {len(NAMES)} || true"
    joined = f"{len(NAMES)} of {len(NAMES)} have joined"
    told = eventually(
        "all nodes have joined", START_S, lambda: joined in (said := site.run(*remote, doctor)) and said
    )
    assert "HCCL all-reduce" in told

    engine: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    source = str(demo_model.ensure(lambda done, total: None))
    doors = {name: {"host": "0.0.0.0", "port": port} for name, port in DOORS.items()}
    model = {"name": "demo", "source": source, "engines": 1, "engine": engine}
    fleet = {"name": "on-prem", "device": "virtual", "models": [model], **doors}
    application = {
        "name": "npufleet",
        "import_path": "npufleet.cluster.app:build",
        "args": fleet,
        "route_prefix": None,
    }
    wish = site.folder / "head" / "serve.yaml"
    wish.write_text(json.dumps({"proxy_location": "Disabled", "applications": [application]}))
    site.run(*remote, f"{on_head} serve deploy ~/serve.yaml")

    address = eventually("the gateway listens", START_S, lambda: door(site, DOORS["gateway"]))
    eventually("the model is there", START_S, lambda: models(address) == ["demo"] and asked(address))
    with grpc.insecure_channel(
        f"{door(site, DOORS['router']).rpartition(':')[0]}:{DOORS['router']}"
    ) as channel:
        request = pb.GenerateRequest(
            request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=pb.SamplingParams(max_tokens=4, temperature=0.0),
        )  # fmt: skip
        answers = list(pb_grpc.VllmEngineStub(channel).Generate(request, timeout=120))
        assert len(answers[-1].complete.output_ids) == 4
    site.run("down", "-y", str(site.file))
    # It stops the head; a worker's Ray gives up a minute later, and what it runs ends with it.
    eventually("the gateway is gone", START_S, lambda: not door(site, DOORS["gateway"]))


DOORS = {"gateway": 8000, "router": 50051, "metrics": 8001}


def door(site: Site, port: int) -> str:
    """host:port of whichever host listens there, empty if none does."""
    return next((f"{host}:{port}" for host in site.addresses.values() if _listens(host, port)), "")


def models(address: str) -> list[str]:
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"http://{address}/v1/models", verify=PLAIN)
        return [model["id"] for model in answer.json()["data"]]
    return []


def asked(address: str) -> bool:
    """Whether the model answers, and knows."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = httpx.post(
        f"http://{address}/v1/chat/completions",
        json={**body, "temperature": 0, "max_tokens": 20},
        timeout=120,
        verify=PLAIN,
    )
    return answer.status_code == 200 and "Paris" in answer.json()["choices"][0]["message"]["content"]


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False
