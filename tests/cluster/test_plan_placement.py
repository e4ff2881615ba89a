"""``npufleet plan placement``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npufleet.cluster import cli

FLEET = """
device: npu
models:
  - {name: qwen, source: /m, engines: 2, engine: {tensor_parallel_size: 4}}
  - {name: deepseek, source: /m, engine: {tensor_parallel_size: 16}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return str(file)


def test_plans_as_text(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "placement", fleet, "--servers", "a3=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "qwen 0      a3-00001 NPU 0-3",
        "qwen 1      a3-00001 NPU 4-7",
        "deepseek 0  a3-00000 NPU 0-15",
        "3 of 3 engines placed on 24 of 32 NPUs, cost 6",
    ]


def test_plans_as_json_name_every_rank(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "placement", fleet, "--servers", "a2=1", "--json"]) == 1
    told = {entry["engine"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert told["qwen 1"]["bundles"] == [{"node": "a2-00000", "npu": i} for i in range(4, 8)]
    assert (told["deepseek 0"]["rule"], told["deepseek 0"]["never"]) == ("hccs", True)


@pytest.mark.parametrize("servers", ["a3", "h100=2", "a3=0", "a3=x", "a3=1,"])
def test_wrong_servers(fleet: str, servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "placement", fleet, "--servers", servers]) == 2
    assert "npufleet: error: --servers" in capsys.readouterr().err


def test_no_cluster_there(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "placement", fleet, "--address", "127.0.0.1:9"]) == 2
    assert "no Ray cluster there" in capsys.readouterr().err
