"""`npufleet doctor` and the detection of devices: each finding both ways."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from npufleet.cluster import device, doctor
from npufleet.cluster.doctor import Level


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=text, stderr="")
    monkeypatch.setattr(device, "virtual_npu", lambda *arguments: answer)


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "virtual NPU: enabled in /x\ndevice:      virtual:2\n")


@pytest.fixture
def not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "virtual NPU: not enabled in /x\n")


def davinci(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_real_npus_are_the_numbered_device_files(tmp_path: Path) -> None:
    assert device.real_npus(tmp_path) == 0
    assert device.real_npus(davinci(tmp_path, "davinci0", "davinci11", "davinci_manager", "null")) == 2


def test_virtual_npus_where_enabled(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUFLEET_DEVICE", "virtual:2:Ascend910_9391,hbm=1GiB")
    assert str(device.detect()) == "2 virtual NPUs Ascend910_9391"
    assert device.detect("virtual").kind == "virtual"
    with pytest.raises(
        ValueError, match="the configuration says device: npu, but the virtual NPU is enabled"
    ):
        device.detect("npu")
    monkeypatch.setenv("NPUFLEET_DEVICE", "8 cards")
    with pytest.raises(ValueError, match="NPUFLEET_DEVICE is '8 cards'; expected virtual:COUNT"):
        device.detect()


def test_a_refused_setting_is_not_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUFLEET_DEVICE", "virtual:99")  # what the virtual NPU's own command line says of it
    with pytest.raises(ValueError, match="NPUFLEET_DEVICE='virtual:99': COUNT must be"):
        device.detect()


def test_real_npus_where_not_enabled(
    not_enabled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    davinci(tmp_path, "davinci0")
    monkeypatch.setattr(device, "real_npus", lambda: len(list(tmp_path.iterdir())))
    assert str(device.detect("npu")) == "1 NPU"
    with pytest.raises(ValueError, match="run: npufleet virtual-npu enable"):
        device.detect("virtual")


def test_no_npu_at_all_says_what_to_do(not_enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "real_npus", lambda: 0)
    finding = doctor.devices()
    assert finding.level is Level.FAIL
    assert "npufleet virtual-npu enable" in finding.remedy


def test_a_stale_virtual_npu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPUFLEET_DEVICE", raising=False)
    say(monkeypatch, "virtual NPU: enabled in /x\nstale:       the sources have changed\n")
    assert doctor.devices().level is Level.WARN
    say(monkeypatch, "virtual NPU: enabled in /x\n")
    assert doctor.devices().level is Level.OK


def test_versions_against_the_requirements() -> None:
    found = {finding.name: finding.level for finding in doctor.versions()}
    assert {"vllm", "torch", "torch-npu", "ray"} <= found.keys()
    right, wrong = SpecifierSet(">=1"), SpecifierSet("<1")
    assert doctor.version("pytest", ">=1", right.contains).level is Level.OK
    late = doctor.version("pytest", "<1", wrong.contains)
    assert late.level is Level.FAIL
    assert "does not fit <1" in late.text
    absent = doctor.version("no-such-package-here", "==1", right.contains)
    assert (absent.level, absent.text) == (Level.FAIL, "not installed")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        finding = doctor.free_port("gateway", "127.0.0.1", number)
        assert finding.level is Level.FAIL
        assert f"127.0.0.1:{number}" in finding.text
        assert "gateway.port" in finding.remedy
    assert doctor.free_port("gateway", "127.0.0.1", number).level is Level.OK


@pytest.mark.parametrize(("mib", "level"), [(64, Level.FAIL), (512, Level.WARN), (4096, Level.OK)])
def test_shared_memory(mib: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=mib, f_frsize=1 << 20))
    assert doctor.shared_memory().level is level


def test_absent_shared_memory(tmp_path: Path) -> None:
    assert doctor.shared_memory(tmp_path / "none").level is Level.FAIL


@pytest.mark.parametrize(("limit", "level"), [(256, Level.WARN), (1 << 20, Level.OK)])
def test_open_files(limit: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (limit, limit))
    assert doctor.open_files().level is level
