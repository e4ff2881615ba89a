"""The files in deploy/ray: Ray accepts them, every one asks for the token, and the start script says what it should."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet.cluster.topology.sources.declared import Declared

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
CLUSTERS = sorted(FOLDER.glob("on-prem-*.yaml"))


def test_there_are_files_for_both_servers() -> None:
    assert [file.name for file in CLUSTERS] == ["on-prem-a2.yaml", "on-prem-a3.yaml"]


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.name)
def test_ray_accepts_the_cluster_files(file: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    data: dict[str, Any] = yaml.safe_load(file.read_text())
    validate_config(prepare_config(data))
    assert data["min_workers"] == data["max_workers"] == len(data["provider"]["worker_ips"])
    mounts = data["file_mounts"]
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
    for source in mounts.values():
        assert source.startswith("~") or (FOLDER.parents[1] / source).is_file()
    for role, head in (("head", "-"), ("worker", "$RAY_HEAD_IP")):  # Ray sets the variable for workers only
        (command,) = data[f"{role}_start_ray_commands"]
        assert f"start-node.sh {role} {head} ~/npufleet/node.yaml" in command
    nodes = 1 + len(data["provider"]["worker_ips"])
    assert f"--expect {nodes}" in file.read_text()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("node-*.yaml")), ids=lambda file: file.name)
def test_the_declared_nodes_parse(file: Path) -> None:
    told = Declared(path=file).look()
    assert told.network or told.super_pod


STUB = '#!/bin/bash\necho "$0" "$@" "mode=$RAY_AUTH_MODE v2=$RAY_enable_autoscaler_v2" >> "$HOME/calls"\n'
NODE = '#!/bin/bash\necho "--resources={\\"NPU\\":2} --labels=a=b"\necho "node $*" >> "$HOME/calls"\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in (("ray", STUB), ("npufleet", NODE)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    return tmp_path


def start(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.run(
        ["bash", str(FOLDER / "start-node.sh"), *arguments],
        env={**kept, "HOME": str(home), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def calls(home: Path) -> list[str]:
    return (home / "calls").read_text().splitlines()


def test_the_head_is_started_with_token_flags_and_the_right_autoscaler(home: Path) -> None:
    (home / "ray_bootstrap_config.yaml").write_text("{}")
    done = start(home, "head", "127.0.0.1")
    assert done.returncode == 0, done.stderr
    said = calls(home)[-1]
    assert "start --head --port=6379 --node-ip-address=127.0.0.1 --dashboard-host=127.0.0.1" in said
    assert f"--autoscaling-config={home}/ray_bootstrap_config.yaml" in said
    assert '--resources={"NPU":2} --labels=a=b mode=token v2=0' in said
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert "secret" not in said + done.stdout + done.stderr


def test_the_head_of_ray_up_finds_its_address_in_the_cluster_file(home: Path) -> None:
    (home / "ray_bootstrap_config.yaml").write_text("provider: {type: local, head_ip: 127.0.0.1}")
    done = start(home, "head", "-")
    assert done.returncode == 0, done.stderr
    assert "start --head --port=6379 --node-ip-address=127.0.0.1" in calls(home)[-1]
    (home / "ray_bootstrap_config.yaml").unlink()
    assert start(home, "head", "-").returncode != 0


def test_a_worker_joins_with_its_own_address_and_declared_file(home: Path) -> None:
    file = home / "node.yaml"
    file.write_text("super_pod: '1'\n")
    done = start(home, "worker", "127.0.0.1", str(file))
    assert done.returncode == 0, done.stderr
    assert calls(home)[0] == f"node node --file {file}"
    assert "start --address=127.0.0.1:6379 --node-ip-address=127.0.0.1" in calls(home)[-1]


def test_no_token_no_start(home: Path) -> None:
    (home / ".ray" / "auth_token").unlink()
    done = start(home, "head", "127.0.0.1")
    assert done.returncode == 1
    assert "ray get-auth-token --generate" in done.stderr
    assert not (home / "calls").exists()


@pytest.mark.parametrize("arguments", [(), ("boss", "127.0.0.1"), ("head",)])
def test_wrong_use(home: Path, arguments: tuple[str, ...]) -> None:
    assert start(home, *arguments).returncode == 2


@pytest.mark.parametrize("file", [*CLUSTERS, *FOLDER.glob("*.sh")], ids=lambda file: file.name)
def test_no_file_starts_ray_without_a_token(file: Path) -> None:
    text = file.read_text()
    assert "RAY_AUTH_MODE=token" in text or "start-node.sh" in text
    assert "RAY_AUTH_MODE=disabled" not in text
