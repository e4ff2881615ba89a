"""The controller's Prometheus series, computed from its state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..config import FleetConfig
from ..endpoints import EngineState
from .progress import ProgressBoard
from .registry import Registry


class ControllerSeries(Collector):
    """Series of the fleet as the controller sees it; every sample carries fleet and device."""

    def __init__(self, config: FleetConfig, registry: Registry, progress: ProgressBoard) -> None:
        self._config = config
        self._registry = registry
        self._progress = progress

    def collect(self) -> Iterable[Metric]:
        """Yield the series."""
        own = [self._config.name, self._config.device]
        wanted = GaugeMetricFamily(
            "npufleet_engines_wanted",
            "Engines that the configuration asks for.",
            labels=["fleet", "device", "model"],
        )
        engines = GaugeMetricFamily(
            "npufleet_engines",
            "Engines known to the controller, by state.",
            labels=["fleet", "device", "model", "state"],
        )
        counts = Counter((e.model, e.state) for e in self._registry.snapshot().endpoints)
        for model in self._config.models:
            wanted.add_metric([*own, model.name], model.engines)
            for state in EngineState:
                engines.add_metric([*own, model.name, str(state)], counts[model.name, state])
        yield wanted
        yield engines
        yield self._start_seconds(own)
        version = GaugeMetricFamily(
            "npufleet_endpoints_version", "Version of the endpoint snapshot.", labels=["fleet", "device"]
        )
        version.add_metric(own, self._registry.version)
        yield version

    def _start_seconds(self, own: list[str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "npufleet_engine_start_seconds",
            "How long each phase of an engine's start took.",
            labels=["fleet", "device", "model", "engine_id", "phase"],
        )
        for entry in self._progress.all():
            for phase, seconds in entry.seconds.items():
                family.add_metric([*own, entry.model, entry.engine_id, phase], seconds)
        return family
