"""How busy an engine is, read from vLLM's own Prometheus series in its process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

WINDOW_S = 60.0
"""Latencies are those of about the last minute."""

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:inter_token_latency_seconds"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
_SHARE = 0.9

Buckets = dict[float, float]  # upper edge in seconds -> requests so far, cumulative


@dataclass(kw_only=True)
class LoadMeter:
    """Sums over the data-parallel ranks of one engine; latencies as the 90th percentile of a sliding window."""

    registry: CollectorRegistry
    clock: Callable[[], float] = time.monotonic
    _history: list[tuple[float, dict[str, Buckets]]] = field(default_factory=list)

    def read(self) -> dict[str, float]:
        """Return running, waiting, kv_usage and, where there were requests, ttft_p90 and tpot_p90 (seconds)."""
        families = {family.name: family for family in self.registry.collect()}
        usage = _values(families.get(KV_USAGE))
        told = {
            "running": sum(_values(families.get(RUNNING))),
            "waiting": sum(_values(families.get(WAITING))),
            "kv_usage": sum(usage) / len(usage) if usage else 0.0,
        }
        now = self.clock()
        seen = {name: _buckets(families.get(name)) for name in (TTFT, TPOT)}
        self._history = [entry for entry in self._history if now - entry[0] <= WINDOW_S]
        oldest = self._history[0][1] if self._history else {}
        self._history.append((now, seen))
        for key, name in (("ttft_p90", TTFT), ("tpot_p90", TPOT)):
            value = percentile(seen[name], oldest.get(name, {}), _SHARE)
            if value is not None:
                told[key] = value
        return told


def percentile(after: Buckets, before: Buckets, share: float) -> float | None:
    """Return the upper edge of the bucket below which ``share`` of what came between two looks lies.

    None if nothing came. What lies above the last finite edge is told as twice that edge.
    """
    came = {edge: count - before.get(edge, 0.0) for edge, count in sorted(after.items())}
    total = came.get(float("inf"), 0.0)
    if total <= 0:
        return None
    edge = next(edge for edge, count in came.items() if count >= share * total)
    return edge if edge != float("inf") else 2.0 * max((e for e in came if e != edge), default=0.5)


def _values(family: Metric | None) -> list[float]:
    return [sample.value for sample in family.samples if sample.name == family.name] if family else []


def _buckets(family: Metric | None) -> Buckets:
    found: Buckets = {}
    for name, labels, value in _samples(family):
        if name.endswith("_bucket"):
            edge = float(labels["le"])
            found[edge] = found.get(edge, 0.0) + value
    return found


def _samples(family: Metric | None) -> Iterable[tuple[str, dict[str, str], float]]:
    return ((s.name, s.labels, s.value) for s in family.samples) if family else ()
