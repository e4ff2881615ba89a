"""The controller's Prometheus series, computed from its state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..deploy.wish import Wish
from ..endpoints import EngineState
from .health import Health
from .progress import ProgressBoard
from .registry import Registry


class ControllerSeries(Collector):
    """Series of the fleet as the controller sees it; every sample carries fleet and device."""

    def __init__(
        self, wish: Callable[[], Wish], registry: Registry, progress: ProgressBoard, health: Health
    ) -> None:
        self._wish = wish
        self._health = health
        self._registry = registry
        self._progress = progress

    def collect(self) -> Iterable[Metric]:
        """Yield the series."""
        wish = self._wish()
        own = [wish.config.name, wish.config.device]
        wanted = GaugeMetricFamily(
            "npufleet_engines_wanted",
            "Engines that there shall be now.",
            labels=["fleet", "device", "model"],
        )
        engines = GaugeMetricFamily(
            "npufleet_engines",
            "Engines known to the controller, by state.",
            labels=["fleet", "device", "model", "state"],
        )
        counts = Counter((e.model, e.state) for e in self._registry.snapshot().endpoints)
        for model in wish.config.models:
            wanted.add_metric([*own, model.name], wish.engines[model.name])
            for state in EngineState:
                engines.add_metric([*own, model.name, str(state)], counts[model.name, state])
        yield wanted
        yield engines
        yield self._start_seconds(own)
        deaths = CounterMetricFamily(
            "npufleet_engine_deaths",
            "Engines that ended without being asked to, since this controller began.",
            labels=["fleet", "device", "model"],
        )
        for name, count in self._health.deaths.items():
            deaths.add_metric([*own, name], count)
        yield deaths
        fenced = GaugeMetricFamily(
            "npufleet_npus_fenced", "NPUs that no engine gets now.", labels=["fleet", "device"]
        )
        fenced.add_metric(own, len(self._health.fenced()))
        yield fenced
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
