"""Service discovery and the exporter, as Prometheus would read them."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from npufleet.cluster import addresses
from npufleet.cluster.endpoints import EngineEndpoint, EngineState
from npufleet.cluster.metrics import discovery, exporter


def endpoint(engine: str, url: str) -> EngineEndpoint:
    return EngineEndpoint(
        engine_id=engine,
        model="m",
        address="h:1",
        metrics_url=url,
        state=EngineState.READY,
        device="virtual npu X",
    )


def test_every_target_once_with_its_labels() -> None:
    engines = [endpoint("a", "http://10.0.0.1:9000/metrics"), endpoint("b", "")]
    groups = discovery.targets("f", engines, [("controller", "http://127.0.0.1:8001/metrics")])
    assert [group["targets"] for group in groups] == [["127.0.0.1:8001"], ["10.0.0.1:9000"]]
    labels = groups[1]["labels"]
    assert labels["component"] == "engine"
    assert (labels["fleet"], labels["engine_id"], labels["model"]) == ("f", "a", "m")
    assert labels["device"] == "virtual npu X"
    assert labels["__metrics_path__"] == "/metrics"
    assert "node_id" not in labels  # an empty label is no label
    assert all(isinstance(value, str) for group in groups for value in group["labels"].values())


@pytest.mark.parametrize("url", ["10.0.0.1:9000", "ftp://h:1/x", "http://h/metrics"])
def test_a_url_that_prometheus_cannot_scrape(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT/PATH"):
        discovery.target(url, "f", "engine")


def test_a_wildcard_is_advertised_as_the_node() -> None:
    assert addresses.reachable("0.0.0.0", "10.0.0.1") == "10.0.0.1"
    assert addresses.reachable("127.0.0.1", "10.0.0.1") == "127.0.0.1"
    assert addresses.netloc("::1", 80) == "[::1]:80"
    running = exporter.start("0.0.0.0", 0, CollectorRegistry(), node_address="127.0.0.1")
    with urllib.request.urlopen(running.url, timeout=10) as response:
        assert response.status == 200
    running.stop()


def test_the_exporter_serves_its_registry_and_stops() -> None:
    registry = CollectorRegistry()
    Gauge("npufleet_test", "A gauge.", registry=registry).set(3)
    running = exporter.start("127.0.0.1", 0, registry)
    with urllib.request.urlopen(running.url, timeout=10) as response:
        families = {f.name: f for f in text_string_to_metric_families(response.read().decode())}
    assert families["npufleet_test"].samples[0].value == 3
    running.stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(running.url, timeout=10)
