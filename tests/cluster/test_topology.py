"""What a node has: npu-smi's texts, the other sources, their order, and the way through Ray's labels and back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.label_utils import validate_node_label_syntax

from npufleet.cluster.topology import chips, facts, labels, npu_smi, simulated
from npufleet.cluster.topology.facts import Facts
from npufleet.cluster.topology.model import Node, indices_of, mask_of
from npufleet.cluster.topology.sources import declared, device_files, environment
from npufleet.cluster.topology.sources import npu_smi as source

TEXTS = Path(__file__).parent / "topology_texts"
PARTS = {("info",): "info", ("info", "-m"): "m", ("info", "-t", "topo"): "topo"}


def machine(name: str) -> source.Here:
    """npu-smi of a machine whose texts lie beside the tests."""

    def ask(*arguments: str) -> str:
        part = PARTS.get(arguments) or {"board": "board", "spod-info": "spod"}[arguments[2]]
        file = TEXTS / f"{name}_{part}.txt"
        return file.read_text() if file.exists() else ""

    return source.Here(ask=ask)


def test_an_a2_server() -> None:
    told = machine("a2").look()
    assert told.soc == "Ascend910B2"
    assert told.indices == tuple(range(8))
    assert told.unhealthy == (5,)
    assert told.domains == (tuple(range(8)),)
    assert told.packages is None
    assert told.super_pod is None
    assert told.hbm_mib == 65536
    node = facts.node("n", told)
    assert node.shape.family is chips.Family.A2
    assert indices_of(node.usable) == (0, 1, 2, 3, 4, 6, 7)
    assert not node.shape.rings


def test_an_a3_server() -> None:
    told = machine("a3").look()
    assert told.soc == "Ascend910_9392"
    assert told.indices == tuple(range(16))
    assert told.domains == (tuple(range(16)),)
    assert told.packages == tuple((2 * i, 2 * i + 1) for i in range(8))
    assert told.super_pod == "3"
    assert facts.node("n", told).fabric == "super-pod 3"


def test_a_310p_server_has_memory_without_hbm_and_no_hccs() -> None:
    told = machine("310p").look()
    assert told.soc == "Ascend310P3"
    assert told.indices == (0, 1, 2, 3)  # although the cards sit in slots 1 and 4
    assert told.domains is None
    assert told.hbm_mib == 21527
    assert facts.node("n", told).domains == ((0, 1, 2, 3),)


def test_box16_is_two_meshes() -> None:
    links = npu_smi.topo((TEXTS / "a2_box16_topo.txt").read_text())
    assert npu_smi.meshes(links, npu_smi.Link.HCCS) == (tuple(range(8)), tuple(range(8, 16)))
    assert facts.node("n", Facts(soc="Ascend910B3", indices=tuple(range(16)))).shape.rings


def test_rows_of_npu_smi() -> None:
    rows = npu_smi.info((TEXTS / "a2_info.txt").read_text())
    assert [(row.npu, row.health, row.used_mib) for row in rows[:2]] == [(0, "OK", 3499), (1, "OK", 60053)]
    assert npu_smi.info((TEXTS / "a3_info.txt").read_text())[3].physical == 3
    assert npu_smi.mapping((TEXTS / "310p_m.txt").read_text()) == {(1, 0): 0, (1, 1): 1, (4, 0): 2, (4, 1): 3}
    assert npu_smi.info("npu-smi: command not found") == []


def test_no_npu_smi_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.shutil, "which", lambda name: None)
    assert source.Here().look() == Facts()


def test_a_failing_npu_smi_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.shutil, "which", lambda name: "/bin/npu-smi")
    monkeypatch.setattr(
        source.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stdout="junk")
    )
    assert source.Here().look() == Facts()


@pytest.mark.parametrize(
    ("soc", "family", "hbm"),
    [
        ("Ascend910B4", "A2", 32768),
        ("910B2", "A2", 65536),
        ("Ascend910_9391", "A3", 65536),
        ("Ascend310P3", "310P", 24576),
        ("Ascend950PR", "A5", 0),
        ("Ascend910", None, 0),
        ("", None, 0),
    ],
)
def test_families(soc: str, family: str | None, hbm: int) -> None:
    assert chips.family_of(soc) == family
    assert chips.hbm_mib(soc) == hbm


def test_files(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    network = tmp_path / "hccn.conf"
    network.write_text("address_0=192.168.1.8\nnetmask_0=255.255.255.0\naddress_3 = 192.168.1.9\n")
    told = device_files.Here(devices=tmp_path, network=network).look()
    assert told.indices == (0, 3)
    assert told.addresses == {0: "192.168.1.8", 3: "192.168.1.9"}
    assert device_files.Here(devices=tmp_path / "no", network=tmp_path / "no").look() == Facts()


@pytest.mark.parametrize(
    ("mask", "seen"), [(None, None), ("", ()), ("NoDevFiles", ()), ("3, 1", (1, 3)), ("0", (0,))]
)
def test_the_mask(mask: str | None, seen: tuple[int, ...] | None) -> None:
    assert environment.visible(mask) == seen


def test_a_mask_that_does_not_parse() -> None:
    with pytest.raises(ValueError, match="ASCEND_RT_VISIBLE_DEVICES is '0;1'; expected indices with commas"):
        environment.visible("0;1")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HCCL_LOGIC_SUPERPOD_ID": "2", "HCCL_SOCKET_IFNAME": "=eth1", "HCCL_IF_IP": "10.0.0.7"}
    told = environment.Here(variables=variables, virtual=False).look()
    assert (told.super_pod, told.interface, told.address, told.indices) == ("2", "eth1", "10.0.0.7", None)
    monkeypatch.setenv("NPUFLEET_DEVICE", "virtual:4:Ascend910_9391")
    virtual = environment.Here(variables={environment.MASK: "1,2,9"}, virtual=True).look()
    assert (virtual.indices, virtual.soc) == ((1, 2), "Ascend910_9391")
    for several in ("eth0,eth1", "^docker", "eth"):
        assert environment.first_interface(several) == ("eth" if several == "eth" else None)


def test_a_declared_file(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        "soc: Ascend910B3\nnpus: 0-3_8-11\nhccs: [0-3, 8-11]\nfailure_domain: rack-7\nhbm_mib: 100\n"
    )
    node = facts.node("n", declared.Declared(path=file).look())
    assert node.domains == ((0, 1, 2, 3), (8, 9, 10, 11))
    assert (node.fails_with, node.hbm_mib, node.npus) == ("rack-7", 100, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 3", "unknown key 'nodes'"),
        ("npus: many", "npus is 'many': 'many' is no list of NPU indices such as 0-3_6"),
        ("hccs: 0-7", "hccs is '0-7': expected a list of groups"),
        ("hbm_mib: none", "hbm_mib: expected an integer"),
        ("[", "not valid YAML"),
        ("- soc", "expected a mapping"),
    ],
)
def test_a_wrong_declared_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        declared.Declared(path=file).look()
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_the_more_trusted_source_wins_field_by_field() -> None:
    first, second = Facts(soc="a", indices=()), Facts(soc="b", indices=(1,), network="n")
    made = facts.merge(first, second)
    assert (made.soc, made.indices, made.network, made.interface) == ("a", (), "n", None)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_read_back(indices: set[int]) -> None:
    assert labels.parse_ranges(labels.ranges(indices)) == tuple(sorted(indices))
    assert indices_of(mask_of(indices)) == tuple(sorted(indices))


def as_ray_tells(node: Node) -> dict[str, object]:
    return {
        "NodeID": node.node_id,
        "Alive": True,
        "NodeManagerAddress": node.address,
        "Resources": {name: float(count) for name, count in labels.resources(node).items()},
        "Labels": labels.to_labels(node),
    }


@given(
    kind=st.sampled_from(sorted(simulated.SERVERS)),
    unhealthy=st.sets(st.integers(0, 7)),
    rack=st.sampled_from([None, "rack-1"]),
    pod=st.sampled_from([None, "4"]),
    addresses=st.dictionaries(st.integers(0, 7), st.sampled_from(["10.0.0.1", "fe80::1"])),
)
def test_a_node_comes_back_through_rays_labels(
    kind: str, unhealthy: set[int], rack: str | None, pod: str | None, addresses: dict[int, str]
) -> None:
    node = simulated.server(
        kind,
        "n",
        unhealthy=tuple(unhealthy),
        failure_domain=rack,
        super_pod=pod,
        addresses=addresses,
        address="10.1.1.1",
        interface="eth0",
    )
    told = as_ray_tells(node)
    validate_node_label_syntax(told["Labels"])
    back = labels.from_ray(told)
    assert facts_only(back) == facts_only(node)


def facts_only(node: Node) -> Node:
    return Node(**{**{key: getattr(node, key) for key in node.__dataclass_fields__}, "labels": {}})


def test_a_node_without_our_labels_has_what_ray_counts() -> None:
    node = labels.from_ray({"NodeID": "n" * 40, "Resources": {"NPU": 16.0}, "Labels": {labels.TYPE: "910B3"}})
    assert (node.npus, node.exact, len(node.domains), node.title) == (16, False, 2, "n" * 12)


def test_a_label_that_does_not_parse_names_the_node() -> None:
    with pytest.raises(ValueError, match=r"node 10.0.0.1: label npufleet/hccs: 'x' is no list"):
        labels.from_ray({"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Labels": {labels.HCCS: "0-7.x"}})


def test_a_simulated_fleet_of_any_size() -> None:
    fleet = simulated.fleet({"a2": 5, "a3": 100})
    assert fleet.npus == 5 * 8 + 100 * 16
    assert len({node.super_pod for node in fleet.nodes} - {""}) == 3
    assert len({node.fails_with for node in fleet.nodes}) == 2 + 25
    with pytest.raises(ValueError, match="no server 'h200'; known are a2, a2-16, a3, 310p"):
        simulated.server("h200", "n")
