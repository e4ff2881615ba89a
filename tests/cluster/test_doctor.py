"""`npufleet doctor` and the detection of devices: each finding both ways."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from npufleet.cluster import config, device, hccl_errors
from npufleet.cluster.doctor import examine, hardware, nodes, reach, stack
from npufleet.cluster.doctor import local as doctor
from npufleet.cluster.doctor.finding import Level
from npufleet.cluster.topology import simulated
from npufleet.cluster.topology.npu_smi import Chip


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


def test_the_table_of_versions_is_what_is_pinned() -> None:
    pinned = {
        wanted.name: str(wanted.specifier)
        for wanted in map(Requirement, importlib.metadata.requires("npufleet") or [])
    }
    assert {name: f"=={version}" for name, version in stack.STACK.packages.items()} == {
        name: pinned[name] for name in stack.STACK.packages
    }


@pytest.mark.parametrize(
    ("older", "newer"), [("8.3.RC1", "8.3"), ("9.0.0", "9.1"), ("24.1.rc2.2", "25.2"), ("25.2.rc1", "25.2.0")]
)
def test_candidates_come_before_their_release(older: str, newer: str) -> None:
    assert stack.order(older) < stack.order(newer)


def test_cann_and_driver_are_read_from_their_files(tmp_path: Path) -> None:
    toolkit = tmp_path / "cann" / "aarch64-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    assert stack.cann({"ASCEND_HOME_PATH": str(tmp_path / "cann")}, ()) == "9.1.0"
    runtime = tmp_path / "old" / "runtime"
    runtime.mkdir(parents=True)
    (runtime / "version.info").write_text("Version=8.2.RC1\n")
    assert stack.cann({}, (str(tmp_path / "none"), str(tmp_path / "old"))) == "8.2.RC1"
    assert stack.cann({}, ()) is None
    file = tmp_path / "version.info"
    file.write_text("Version=25.3.rc1\nascendhal_version=7.35.23\npackage_version=25.3.rc1\n")
    assert stack.driver(file) == "25.3.rc1"
    assert stack.driver(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("found", "level"),
    [(None, Level.FAIL), ("8.2.RC1", Level.WARN), ("9.1.0", Level.OK), ("9.2.0", Level.OK)],
)
def test_versions_of_the_ascend_stack(found: str | None, level: Level) -> None:
    finding = stack.at_least("CANN", found, "9.1", "install it")
    assert finding.level is level
    assert bool(finding.remedy) is (level is not Level.OK)


def test_virtual_npus_need_neither_cann_nor_driver() -> None:
    assert [finding.level for finding in stack.cann_and_driver("virtual")] == [Level.OK]


@pytest.mark.parametrize(
    ("health", "used", "level"),
    [("OK", 3499, Level.OK), ("OK", 60000, Level.WARN), ("Warning", 0, Level.WARN), ("Alarm", 0, Level.FAIL)],
)
def test_the_health_of_an_npu(health: str, used: int, level: Level) -> None:
    row = Chip(
        npu=3, chip=0, physical=None, name="910B2", health=health, bus="", hbm_mib=65536, used_mib=used
    )
    finding = hardware.health(row)
    assert finding.level is level
    assert finding.name == "NPU 3.0"


@pytest.mark.parametrize(
    ("listed", "files", "mask", "levels"),
    [
        (8, tuple(range(8)), None, []),
        (8, (0, 1), None, [Level.FAIL]),
        (2, (0, 1, 2), None, [Level.WARN]),
        (0, (0, 1), "0,1", [Level.OK]),
        (2, (0, 1), "0,5", [Level.FAIL]),
        (2, (0, 1), "all", [Level.FAIL]),
    ],
)
def test_visibility(listed: int, files: tuple[int, ...], mask: str | None, levels: list[Level]) -> None:
    assert [finding.level for finding in hardware.visibility(listed, files, mask)] == levels


def test_checkpoints_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    good, bad = hardware.sources([("m", str(tmp_path)), ("n", str(tmp_path / "no"))])
    assert good.level is Level.OK
    assert bad.level is Level.FAIL and "does not exist on this node" in bad.text


def test_disk_and_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=200 << 30)
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: usage)
    assert hardware.disk(tmp_path / "not" / "yet").level is Level.OK
    usage.free = 1 << 30
    assert hardware.disk(tmp_path).level is Level.WARN
    pages = tmp_path / "meminfo"
    pages.write_text("HugePages_Total:  8\nHugePages_Free:   0\n")
    assert hardware.huge_pages(pages).level is Level.WARN
    pages.write_text("HugePages_Total:  8\nHugePages_Free:   3\n")
    assert hardware.huge_pages(pages).text == "3 of 8 free"


def test_the_tool_for_links_is_missed_only_where_there_are_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    assert [finding.level for finding in hardware.links("Ascend910B3", (0,))] == [Level.WARN]
    assert list(hardware.links("Ascend310P3", (0,))) == []


@pytest.mark.parametrize(
    ("down", "odd", "levels"),
    [
        ((), (), [Level.OK, Level.OK]),
        ((3, 4), (), [Level.WARN, Level.OK]),
        ((), (1,), [Level.OK, Level.FAIL]),
    ],
)
def test_links_and_tls_switches(down: tuple[int, ...], odd: tuple[int, ...], levels: list[Level]) -> None:
    def ask(flag: str, index: str, what: str, get: str) -> str:
        assert (flag, get) == ("-i", "-g")
        if what == "-link":
            return "link status: DOWN\n" if int(index) in down else "link status: UP\n"
        return f"dev_id:{index}, tls switch[{int(int(index) in odd)}](0:disable, 1:enable)\n"

    found = list(hardware.links("Ascend910B3", range(8), ask))
    assert [finding.level for finding in found] == levels
    if down:
        assert found[0].text == "not up: NPU 3-4"
    if odd:
        assert found[1].text == "the switches differ: 0 on NPU 0_2-7; 1 on NPU 1"


def rank(
    where: str, *stages: str, code: int | None = 1, error: str = "", ran: float = 0.0
) -> reach.RankResult:
    return reach.RankResult(where=where, stages=dict.fromkeys(stages, 1.0), code=code, error=error, ran=ran)


def test_the_rank_that_came_least_far_is_named() -> None:
    all_ = ("device", "joined", "reduced", "timed")
    assert reach.judge([rank("a", *all_, code=0), rank("b", *all_, code=0)], 3.0).level is Level.OK
    finding = reach.judge(
        [rank("a", "device", code=None), rank("b", error="107001 invalid device"), rank("c", "device")], 3.0
    )
    assert finding.level is Level.FAIL
    assert finding.text.startswith("b failed (107001 invalid device) while opening its NPU; 3 of 3 ranks")
    assert "107001: the device index is not valid" in finding.remedy
    waited = rank("a", "device", "joined", error="not arrived: rank 1", ran=120.0)
    first = reach.judge([waited, rank("b", "device", "joined", error="no route", ran=2.0)], 120.0)
    assert first.text.startswith("b failed (no route) while connecting HCCL")
    early = reach.judge([rank("b", "device", "joined", error="no route")], 12.0, unheard=2)
    assert early.text == "b failed (no route) while connecting HCCL; 3 of 3 ranks failed"
    silent = reach.judge([rank("a", *all_, code=0)], 240.0, unheard=1)
    assert silent.level is Level.FAIL and silent.text == "nothing was heard of 1 of 2 ranks in 240 s"
    hung = reach.judge([rank("a", "device", "joined", code=None), rank("b", *all_, code=0)], 3.0)
    assert hung.text == "a did not end in time while connecting HCCL; 1 of 2 ranks failed"
    assert "hccn_tool" in hung.remedy


def test_what_a_rank_says_is_read() -> None:
    out = '{"stage": "device", "seconds": 1.0}\n{"stage": "joined", "seconds": 2.0}\n{"wrong": [1.0], "wanted": 3}\n'
    result = reach._result("n", out, "UserWarning: no\n", 1, 2.0)
    assert result.stages == {"device": 1.0, "joined": 2.0}
    assert result.error == "the sum is [1.0], not 3"
    failed = reach._result("n", "", "trace\nRuntimeError: EI0006: getting socket times out\n", 1, 2.0)
    assert failed.error.startswith("EI0006: a rank did not answer when the group connected")
    assert reach.RankResult(**failed.to_dict()) == failed


@pytest.mark.parametrize(
    ("offset", "error", "level"),
    [(0.01, 0.001, Level.OK), (0.6, 0.2, Level.OK), (-0.9, 0.1, Level.WARN), (90.0, 0.1, Level.FAIL)],
)
def test_clocks(offset: float, error: float, level: Level) -> None:
    assert nodes.skewed(offset, error).level is level


def test_ray_must_offer_what_the_node_has() -> None:
    node = simulated.server("a3", "n")
    indices = tuple(range(16))
    assert nodes.counted(node, indices, "").level is Level.OK
    fewer = nodes.counted(node, indices[:8], "--resources={}")
    assert fewer.level is Level.FAIL
    assert fewer.remedy == "restart its Ray: ray start … --resources={}"
    assert nodes.counted(replace(node, exact=False), indices, "").level is Level.WARN
    assert nodes.counted(simulated.server("a3", "n", indices=()), (), "").level is Level.OK


def test_nodes_are_chosen_by_address() -> None:
    fleet = [simulated.server("a2", f"n{i}", address=f"10.0.0.{i}") for i in range(3)]
    assert nodes.choose(fleet, "all") == fleet
    assert [node.node_id for node in nodes.choose(fleet, "10.0.0.2, 10.0.0.0")] == ["n2", "n0"]
    with pytest.raises(ValueError, match=r"no node 10.0.0.9; the cluster has 10.0.0.0, 10.0.0.1, 10.0.0.2"):
        nodes.choose(fleet, "10.0.0.9")


def test_a_free_npu_of_each_node_is_picked() -> None:
    one, two = simulated.server("a2", "n0"), simulated.server("a2", "n1", address="10.0.0.1")
    assert nodes._pick([one, two], {"n0": 0b1100, "n1": 0b1}) == [2, 0]
    assert nodes._pick([one, one], {"n0": 0b1100}) == [2, 3]
    assert nodes._pick([one, two], {"n0": 0b1}) == "not run: no NPU of 10.0.0.1 is free"


@pytest.mark.parametrize("code", ["EI0006", "EJ0003", "507014"])
def test_codes_are_explained(code: str) -> None:
    assert hccl_errors.explain(f"RuntimeError: [ERROR] {code}(timeout)").startswith(f"{code}: ")


def test_numbers_that_are_no_codes_are_left_alone() -> None:
    assert hccl_errors.explain("took 1070012 us, id 9EI0006") == ""


@pytest.mark.parametrize(
    ("text", "level"), [("32768\t60999\n", Level.OK), ("1024 65535", Level.WARN), ("?", Level.OK)]
)
def test_ports_of_hccl_are_not_given_to_others(text: str, level: Level, tmp_path: Path) -> None:
    file = tmp_path / "range"
    file.write_text(text)
    assert hardware.ephemeral_ports(file).level is level
    assert hardware.ephemeral_ports(tmp_path / "none").level is Level.OK


def test_every_node_must_have_joined() -> None:
    assert nodes.joined(4, 4).level is Level.OK
    late = nodes.joined(3, 4)
    assert (late.level, late.text) == (Level.FAIL, "3 of 4 have joined")


def test_what_the_doors_need_is_looked_at(tmp_path: Path) -> None:
    made = examine.doors_of(config.GatewayConfig(api_keys=str(tmp_path / "absent")), config.RouterConfig())
    assert made.level is Level.FAIL and "gateway.api_keys: cannot read" in made.text and made.remedy
    assert examine.doors_of(config.GatewayConfig(), config.RouterConfig()).level is Level.OK
