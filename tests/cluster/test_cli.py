"""The command line: parsing, targets, running fleets, status text. Nothing here starts a fleet."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from npufleet.cluster import (
    cli,
    demo_model,
    device,
    local,
    preflight,
    runs,
    serve,
    start_failure,
    status,
    targets,
)
from npufleet.cluster.device import Device
from npufleet.cluster.engine.last_words import compose


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device, "detect", lambda wanted=None: Device(kind="virtual", count=8, chip="Ascend910B3")
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


def resolve(*arguments: str) -> targets.Target:
    return targets.resolve(cli.parser().parse_args(["serve", *arguments]), lambda text: None)


def test_help_and_parsing_load_nothing_heavy() -> None:
    code = (
        "import sys; from npufleet.cluster import cli; cli.parser().format_help();"
        "print([m for m in ('torch', 'vllm', 'ray', 'grpc', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.strip() == "[]"


def test_a_checkpoint_folder_becomes_a_fleet(virtual: None, checkpoint: Path) -> None:
    made = resolve(str(checkpoint), "--replicas", "2", "--tensor-parallel", "4", "--port", "0").config
    assert made.models[0].name == "Tiny-Model"
    assert made.models[0].source == str(checkpoint)
    assert (made.models[0].engines, made.models[0].tensor_parallel_size, made.npus) == (2, 4, 8)
    assert (made.device, made.gateway.port, made.gateway.host) == ("virtual", 0, "127.0.0.1")


def test_a_port_of_zero_becomes_a_free_one_that_everybody_is_told(virtual: None, checkpoint: Path) -> None:
    given = resolve(str(checkpoint), "--port", "0", "--grpc-port", "0", "--metrics-port", "7003").config
    made = preflight.with_free_ports(given)
    ports = {made.gateway.port, made.router.port, made.metrics.port}
    assert len(ports) == 3
    assert 0 not in ports
    assert made.metrics.port == 7003
    assert serve.gateway_url(made).endswith(f":{made.gateway.port}")


def test_the_cache_is_bounded_on_virtual_npus_only(
    virtual: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"kv_cache_memory_bytes": targets.VIRTUAL_CACHE_BYTES}
    assert resolve(str(checkpoint)).config.models[0].engine == size
    given = resolve(str(checkpoint), "--set", "engine.gpu_memory_utilization=0.5").config.models[0].engine
    assert given == {"gpu_memory_utilization": 0.5}
    monkeypatch.setattr(device, "detect", lambda wanted=None: Device(kind="npu", count=8))
    assert resolve(str(checkpoint)).config.models[0].engine == {}


def test_a_configuration_file_with_overrides(virtual: None, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("device: virtual\nmodels: [{name: m, source: /m}]\nrouter: {port: 7}\n")
    made = resolve(str(file), "--set", "router.policy=round-robin", "--host", "0.0.0.0", "--name", "x").config
    assert (made.name, made.router.policy, made.router.port) == ("x", "round-robin", 7)
    assert {made.router.host, made.gateway.host, made.metrics.host} == {"0.0.0.0"}


def test_the_demo_is_two_engines_and_knows_its_answer(virtual: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "ensure", lambda progress: Path("/models/demo"))
    made = resolve("demo", "--once")
    assert made.config.models[0].engines == 2
    assert (made.question, made.expect) == (targets.DEMO_QUESTION, "Paris")
    assert resolve("demo").question is None
    assert resolve("demo", "--ask").expect == "Paris"
    assert resolve("demo", "--ask", "Who?").expect is None
    assert resolve("demo", "--ask", "Who?", "--expect", "me").expect == "me"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-here"], "is neither 'demo', nor a .yaml FleetConfig, nor a folder"),
        (["absent.yaml"], "no such configuration file"),
        (["DIR", "--set", "max_model_len"], "expected KEY=VALUE"),
        (["DIR", "--set", "engine.max_modl_len=3"], "did you mean 'max_model_len'"),
        (["DIR", "--set", "name=["], "not valid YAML"),
        (["DIR", "--policy", "best"], "got 'best'"),
        (["DIR", "--replicas", "0"], "expected an integer from 1"),
        (["DIR", "--port", "7001", "--grpc-port", "7001"], "gateway.port and router.port are both 7001"),
        (["DIR", "--host", "no such host"], "router.host: expected an address such as"),
        (["DIR", "--host", "no.such.host.invalid"], "set gateway.host to an address of this machine"),
        (["DIR", "--address", "somewhere"], "expected 'auto' or HOST:PORT"),
        (["DIR", "--set", "gateway.api_keys=/absent"], "cannot read /absent"),
    ],
)
def test_wrong_use_is_said_in_one_line(
    virtual: None, checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [str(checkpoint) if argument == "DIR" else argument for argument in arguments]
    assert cli.main(["serve", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_said_at_once(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert cli.main(["serve", str(checkpoint), "--address", address]) == 1
    assert f"no Ray cluster at '{address}': [Errno 111]" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_is_named(
    virtual: None,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path / "file"))
    ports = ("--port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert cli.main(["serve", str(checkpoint), *ports]) == 2
    assert "cannot be written: Not a directory; set NPUFLEET_HOME" in capsys.readouterr().err


def test_a_broken_checkpoint_is_named_before_ray(
    virtual: None, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert cli.main(["serve", str(checkpoint)]) == 2
    assert "model.safetensors has 14 bytes, its header describes 10" in capsys.readouterr().err


def test_why_a_fleet_did_not_come_up_is_said_once() -> None:
    def entry(engine: str, phase: str, detail: str) -> dict[str, Any]:
        return {"engine_id": engine, "model": "m", "phase": phase, "detail": detail, "seconds": {}}

    failed = [entry("a", "failed", "no memory"), entry("b", "failed", "no memory"), entry("c", "ready", "")]
    assert start_failure.why(failed) == "the fleet did not come up\nmodel 'm': no memory"
    assert start_failure.why(failed[2:]) == ""
    assert start_failure.hopeless(failed)
    assert not start_failure.hopeless(failed[1:])  # the next try may be better
    assert start_failure.hopeless([entry("a", "refused", "no such model")])
    twice = [
        entry(
            name, "failed", compose(f"out of memory: {free} MiB free", 1, "10.0.0.7", [f"pid {free} ended"])
        )
        for name, free in (("a", 488), ("b", 486))
    ]
    assert start_failure.hopeless(twice), "the same cause with other numbers and another log"
    assert start_failure.why(twice).splitlines()[1:] == [f"model 'm': {twice[0]['detail']}"]


def test_an_engine_that_dies_while_others_start_does_not_end_the_fleet() -> None:
    from ray.serve.schema import DeploymentStatus as Status
    from ray.serve.schema import DeploymentStatusTrigger as Trigger

    def told(**deployments: tuple[Status, Trigger]) -> SimpleNamespace:
        made = {k: SimpleNamespace(status=s, status_trigger=t) for k, (s, t) in deployments.items()}
        return SimpleNamespace(deployments=made)

    fine = (Status.HEALTHY, Trigger.CONFIG_UPDATE_COMPLETED)
    died = (Status.DEPLOY_FAILED, Trigger.HEALTH_CHECK_FAILED)
    broken = (Status.DEPLOY_FAILED, Trigger.REPLICA_STARTUP_FAILED)
    assert start_failure.only_died(told(engine=died, other=fine))
    assert not start_failure.only_died(told(engine=died, router=broken))
    assert not start_failure.only_died(told(engine=fine)), "then the application itself has failed"
    deaths = [{"model": "m", "why": f"reason {n}"} for n in range(start_failure.MOST_DEATHS)]
    assert start_failure.dying(deaths[1:]) == ""
    assert start_failure.dying(deaths).endswith("model 'm': 5 engines died, the last: reason 4")


def test_an_absent_checkpoint_is_named_before_ray(
    virtual: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("device: virtual\nmodels: [{name: m, source: /absent}]\n")
    assert cli.main(["serve", str(file)]) == 2
    assert "model 'm': its source is '/absent'; expected a folder" in capsys.readouterr().err


def test_an_engine_larger_than_the_machine_is_refused_before_ray(
    virtual: None, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "make_folder", lambda: pytest.fail("nothing must be left behind"))
    ports = ("--port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert cli.main(["serve", str(checkpoint), "--replicas", "3", "--tensor-parallel", "4", *ports]) == 2
    said = capsys.readouterr().err
    assert "12 NPUs are asked for (3 x 4 for Tiny-Model), 8 virtual NPUs Ascend910B3 are here" in said
    assert "lower --replicas or --tensor-parallel, or present more: NPUFLEET_DEVICE=virtual:12" in said
    assert runs.all_running() == []


def test_ray_is_tried_twice_and_its_failure_is_one_line(
    virtual: None, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def late(found: Device, folder: Path) -> None:
        tries.append(folder)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(local, "_init", late)
    monkeypatch.setattr(local, "_end_family", list)
    ports = ("--port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert cli.main(["serve", str(checkpoint), *ports]) == 1
    assert "Ray did not start on this machine: The current node timed out" in capsys.readouterr().err
    assert len(tries) == 2
    assert not tries[0].exists()


def run_of(pid: int, folder: Path | None = None, name: str = "f") -> runs.Run:
    return runs.Run(
        name=name,
        pid=pid,
        started=psutil.Process(pid).create_time(),
        gateway="http://g",
        router="r:1",
        controller="http://c",
        folder=str(folder or ""),
    )


def test_running_fleets_are_found_by_name(own_home: Path) -> None:
    with pytest.raises(ValueError, match="no fleet runs"):
        runs.find(None)
    runs.record(run_of(os.getpid()))
    assert runs.find(None).name == runs.find("f").name == "f"
    with pytest.raises(ValueError, match="no fleet named 'g'"):
        runs.find("g")
    child = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(ValueError, match="already runs here"):
            runs.record(run_of(child.pid))
        runs.record(run_of(child.pid, name="g"))
        with pytest.raises(ValueError, match="say which with --name: "):
            runs.find(None)
    finally:
        child.kill()
        child.wait()


def test_what_a_killed_fleet_left_is_removed(own_home: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    folder = local.make_folder()
    path = runs.record(run_of(child.pid, folder))
    child.kill()
    child.wait()
    (own_home / "run" / "broken.json").write_text("{")
    assert runs.all_running() == []
    assert not path.exists()
    assert not folder.exists()
    assert list((own_home / "run").iterdir()) == []


def test_only_our_own_folders_are_removed(tmp_path: Path) -> None:
    local.remove_folder(tmp_path)
    local.remove_folder(Path(""))
    assert tmp_path.exists()


def test_stop_ends_the_process_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen(["sleep", "60"])
    runs.record(run_of(child.pid))
    assert cli.main(["stop"]) == 0
    assert "fleet f has stopped" in capsys.readouterr().out
    assert child.wait(timeout=10) != 0


def test_status_without_a_fleet_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 2
    assert "no fleet runs on this machine" in capsys.readouterr().err
    assert cli.main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "the controller does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["garbage", "127.0.0.1:8001", "file:///etc/passwd", "http://", "http://[::1", "http://h:x", "http://a b"],
)
def test_status_says_what_a_url_looks_like(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 2
    said = capsys.readouterr().err
    assert repr(url) in said
    assert "expected http://HOST:PORT" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\x00\x00\x12\x04\x00\x00\x00", "the controller does not answer: http://127.0.0.1:"),  # gRPC
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "the controller does not answer: http://127.0.0.1:"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "is not the controller of a fleet; its port is metrics.port"),
    ],
)
def test_status_of_something_else_is_one_line(
    answer: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        assert cli.main(["status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join(timeout=30)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_version_names_the_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {"npufleet", "vllm", "torch", "torch-npu", "ray"} <= lines.keys()


def answer_of_the_controller() -> dict[str, Any]:
    return {
        "fleet": "f",
        "device": "virtual",
        "npus": {"total": 8, "reserved": 1},
        "models": [{"name": "m", "wanted": 2, "ready": 1}],
        "engines": [{"engine_id": "m-1", "state": "ready", "address": "h:1", "device": "virtual npu X"}],
        "progress": [
            {"engine_id": "m-1", "phase": "ready", "detail": "", "seconds": {}},
            {"engine_id": "m-2", "phase": "placing", "detail": "no room", "seconds": {"placing": 1.0}},
        ],
        "nodes": [
            {
                "node_id": "abc",
                "address": "10.0.0.1",
                "chip": "Ascend910_9391",
                "super_pod": "3",
                "failure_domain": "rack-7",
                "npus": 8,
                "reserved": 2,
                "devices": [
                    {"npu": i, "healthy": i != 7, "engine": "m-1" if i in (2, 3) else "", "model": "m"}
                    for i in range(8)
                ],
            },
            {"node_id": "head", "address": "10.0.0.2", "npus": 0, "reserved": 0, "devices": []},
        ],
    }


def test_status_text() -> None:
    text = status.render(answer_of_the_controller())
    assert "front ends" not in text, "a controller of an older release tells of none"
    told = status.render({**answer_of_the_controller(), "front_ends": {"wanted": 2, "ready": 1}})
    assert "\n  1 of 2 front ends serve\n" in told
    assert "1 of 8 NPUs in use" in text
    assert "model m: 1 of 2 engines ready" in text
    assert "engine m-1 ready at h:1 on virtual npu X" in text
    assert "engine m-2 placing: no room (placing 1.0 s)" in text
    assert text.splitlines()[-6:] == [
        "  node 10.0.0.1 (Ascend910_9391, super-pod 3, rack-7): 2 of 8 NPUs in use",
        "  ├─ NPU 0-1     free",
        "  ├─ NPU 2-3     m-1",
        "  ├─ NPU 4-6     free",
        "  └─ NPU 7       sick",
        "  node 10.0.0.2: 0 of 0 NPUs in use",
    ]


def test_how_to_talk_names_every_door(virtual: None, checkpoint: Path) -> None:
    text = status.how_to_talk(resolve(str(checkpoint), "--host", "0.0.0.0").config)
    body = json.loads(text.split("-d '")[1].split("'")[0])
    assert body["model"] == "Tiny-Model"
    for part in (
        "curl http://127.0.0.1:8000/v1",
        "from openai import OpenAI",
        "VllmEngine at 127.0.0.1:50051",
        "/sd",
    ):
        assert part in text


def test_gateway_url_of_a_wildcard_address(virtual: None, checkpoint: Path) -> None:
    assert serve.gateway_url(resolve(str(checkpoint), "--host", "::").config) == "http://127.0.0.1:8000"
    assert serve.gateway_url(resolve(str(checkpoint), "--host", "10.0.0.1").config) == "http://10.0.0.1:8000"
