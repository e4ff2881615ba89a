"""Engines from EndpointSlices: what a slice says, and a watch that loses nothing."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from npufleet.cluster.endpoints import EngineState, Snapshot
from npufleet.cluster.router.discovery import kubernetes
from npufleet.cluster.router.discovery.api import ApiServer
from npufleet.cluster.router.discovery.kubernetes import KubernetesSource, Services
from npufleet.cluster.router.discovery.slices import engines_of, port_of
from tests.fakes.kubernetes import FakeKubernetes, endpoint_slice, pod

from .certificates import Authority
from .router_fakes import MODEL, FakeEngine, fleet, generate_request, tokens_of, until

SERVICES = Services(namespace="serving", names=("llm", "draft"), port="")


class Watched:
    """A source that is followed."""

    def __init__(self, source: KubernetesSource) -> None:
        self.snapshots: list[Snapshot] = []
        self._task = asyncio.create_task(self._follow(source))

    async def _follow(self, source: KubernetesSource) -> None:
        async for snapshot in source.watch():
            self.snapshots.append(snapshot)

    @property
    def engines(self) -> list[str]:
        return [e.engine_id.partition("-")[0] for e in self.snapshots[-1].endpoints] if self.snapshots else []

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def watched(*slices, **server):
    api = await FakeKubernetes(**server).start()
    for piece in slices:
        api.put(piece)
    watch = Watched(KubernetesSource(ApiServer(url=api.url), SERVICES, "m"))
    try:
        yield api, watch
    finally:
        await watch.close()
        await api.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(kubernetes, "_SHORTEST_PAUSE", 0.02)


def test_conditions_become_states_and_labels_the_model():
    labels = {"npufleet.io/model": "qwen", "npufleet.io/role": "prefill"}
    piece = endpoint_slice(
        "s", "llm", pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False, serving=False),
        pod("c", "10.0.0.3", ready=False, terminating=True), pod("d", "10.0.0.4", ready=None), labels=labels,
    )  # fmt: skip
    a, b, c, d = engines_of([piece], "", "other")
    assert (a.engine_id, a.address, a.model, a.role, a.node_id) == (
        "a-a0000-11",
        "10.0.0.1:50051",
        "qwen",
        "prefill",
        "node-1",
    )
    states = [e.state for e in (a, b, c, d)]
    assert states == [EngineState.READY, EngineState.STARTING, EngineState.DRAINING, EngineState.READY]


def test_an_endpoint_in_two_slices_is_one_engine_and_the_better_word_counts():
    one = endpoint_slice("s1", "llm", pod("a", ready=False))
    two = endpoint_slice("s2", "llm", pod("a"))
    for order in ([one, two], [two, one]):
        (engine,) = engines_of(order, "grpc", "m")
        assert engine.state is EngineState.READY


def test_slices_without_the_port_or_with_names_have_no_engines():
    assert engines_of([endpoint_slice("s", "llm", pod("a"))], "http", "m") == ()
    assert engines_of([endpoint_slice("s", "llm", pod("a"), addressType="FQDN")], "", "m") == ()
    assert engines_of([endpoint_slice("s", "llm", endpoints=None)], "", "m") == ()
    ipv6 = endpoint_slice("s", "llm", pod("a", "fd00::1"), addressType="IPv6")
    assert engines_of([ipv6], "50051", "m")[0].address == "[fd00::1]:50051"


def test_ports_by_name_by_number_and_alone():
    ports = [
        {"name": "grpc", "port": 1},
        {"name": "http", "port": 2},
        {"name": "u", "port": 3, "protocol": "UDP"},
    ]
    assert [port_of(ports, wanted) for wanted in ("", "http", "2", "3", "x")] == [1, 2, 2, None, None]
    assert port_of([{"name": "", "port": 9}], "") == 9
    assert port_of([], "") is None


def test_services_are_of_one_namespace():
    parsed = Services.parse(["llm:grpc", "draft:grpc"], "serving")
    assert (parsed.namespace, parsed.names, parsed.port) == ("serving", ("llm", "draft"), "grpc")
    assert Services.parse(["other/llm"], "serving").namespace == "other"
    with pytest.raises(ValueError, match="one namespace"):
        Services.parse(["a/llm", "b/llm"], "serving")
    with pytest.raises(ValueError, match=r"is not \[NAMESPACE/\]SERVICE"):
        Services.parse(["a/b/llm"], "serving")


async def test_changes_come_as_they_happen_and_others_services_do_not():
    async with watched(endpoint_slice("s1", "llm", pod("a")), endpoint_slice("x", "else", pod("z"))) as (
        api,
        w,
    ):
        await until(lambda: w.engines == ["a"])
        api.put(endpoint_slice("s2", "draft", pod("b")))
        await until(lambda: w.engines == ["a", "b"])
        api.put(endpoint_slice("s1", "llm", pod("a"), pod("c")))
        await until(lambda: w.engines == ["a", "b", "c"])
        api.delete("s2")
        await until(lambda: w.engines == ["a", "c"])
        api.put(endpoint_slice("x", "else", pod("z"), pod("y")))
        versions = [snapshot.version for snapshot in w.snapshots]
        assert versions == sorted(set(versions)) and api.lists == 1


async def test_pages_of_a_long_list_are_all_read():
    slices = [endpoint_slice(f"s{i}", "llm", pod(f"{i:02}", f"10.0.0.{i}")) for i in range(7)]
    async with watched(*slices) as (api, w):
        await until(lambda: len(w.engines) == 7)
        api.page = 3
        api.compact()
        api.cut()
        api.put(endpoint_slice("s7", "llm", pod("07", "10.0.0.7")))
        await until(lambda: len(w.engines) == 8)


async def test_a_broken_watch_goes_on_from_where_it_was():
    async with watched(endpoint_slice("s1", "llm", pod("a"))) as (api, w):
        await until(lambda: w.engines == ["a"] and api.watches)
        api.bookmark()
        api.put(endpoint_slice("s2", "llm", pod("b")))
        await until(lambda: w.engines == ["a", "b"])
        api.cut()
        api.put(endpoint_slice("s3", "llm", pod("c")))
        await until(lambda: w.engines == ["a", "b", "c"])


async def test_lost_history_is_made_good_by_a_new_list():
    async with watched(endpoint_slice("s1", "llm", pod("a"))) as (api, w):
        await until(lambda: w.engines == ["a"] and api.watches)
        api.down = True
        api.cut()
        api.delete("s1")
        api.put(endpoint_slice("s2", "llm", pod("b")))
        api.compact()
        await asyncio.sleep(0.1)
        assert w.engines == ["a"]  # while the server is away the last ones stay
        api.down = False
        await until(lambda: w.engines == ["b"])


async def test_it_trusts_its_authority_and_shows_a_token_that_is_renewed(tmp_path: Path):
    authority = Authority(tmp_path)
    own = authority.sign("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.certificate, own.key)
    api = await FakeKubernetes(token="first", tls=context).start()
    api.put(endpoint_slice("s1", "llm", pod("a")))
    (tmp_path / "token").write_text("wrong\n")
    (tmp_path / "ca.crt").write_bytes(authority.ca.read_bytes())
    host, _, port = api.url.removeprefix("https://").rpartition(":")
    watch = Watched(KubernetesSource(ApiServer.in_cluster(host, port, tmp_path), SERVICES))
    try:
        await asyncio.sleep(0.1)
        assert not watch.snapshots
        (tmp_path / "token").write_text("first\n")  # as the kubelet renews it
        await until(lambda: watch.engines == ["a"])
        assert watch.snapshots[-1].endpoints[0].model == ""  # to be asked of the engine
    finally:
        await watch.close()
        await api.stop()


async def test_a_router_over_it_routes():
    engine = await FakeEngine(name="a").start()
    api = await FakeKubernetes().start()
    api.put(endpoint_slice("s1", "llm", pod("a"), port=engine.port))
    try:
        source = KubernetesSource(ApiServer(url=api.url), SERVICES, MODEL)
        async with fleet(source=source, wait=False) as f:
            await until(lambda: f.router.picker.models() == {MODEL: 1})
            assert await tokens_of(f.stub.Generate(generate_request(2))) == [6, 7]
            api.put(endpoint_slice("s1", "llm", pod("a", ready=False, terminating=True), port=engine.port))
            await until(lambda: f.router.picker.models() == {MODEL: 0})
    finally:
        await api.stop()
        await engine.stop()


def test_outside_a_pod_the_server_must_be_named(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="does not run in a Kubernetes pod"):
        kubernetes.source_of(["llm"], "m", None)
    assert kubernetes.source_of(["llm"], "m", "http://127.0.0.1:8001/")
