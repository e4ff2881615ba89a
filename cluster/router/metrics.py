"""Prometheus series of the router.

Labels are bounded: ``model`` is a known model deployment or "unknown", ``method`` is a VllmEngine method,
``code`` is a gRPC status, and the series of an engine go when it leaves the fleet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from npufleet.cluster.router.errors import NoEngineReason
from npufleet.cluster.router.member import Member, MemberState
from npufleet.cluster.router.pool import EnginePool

UNKNOWN_MODEL = "unknown"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_OVERHEAD_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)
_CLIENT_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


def outcome_of(code: grpc.StatusCode) -> str:
    """``ok``, ``cancelled``, ``deadline``, ``client_error`` or ``error``."""
    if code is grpc.StatusCode.OK:
        return "ok"
    if code is grpc.StatusCode.CANCELLED:
        return "cancelled"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "deadline"
    return "client_error" if code in _CLIENT_CODES else "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSeries:
    """The series of one model that each of its requests touches."""

    in_flight: Gauge
    first_message: Histogram
    overhead: Histogram


class RouterMetrics:
    """All series, in ``registry``. It is the pool's observer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        prefix = "npufleet_router"
        self.requests = Counter(
            f"{prefix}_requests",
            "Calls that ended, as their client saw them.",
            ["model", "method", "outcome", "code"],
            registry=registry,
        )
        self.in_flight = Gauge(
            f"{prefix}_in_flight", "Generate and Embed calls running now.", ["model"], registry=registry
        )
        self.retries = Counter(
            f"{prefix}_retries",
            "Attempts that failed before any output and were repeated on another engine, by the failure.",
            ["model", "code"],
            registry=registry,
        )
        self.retries_refused = Counter(
            f"{prefix}_retries_refused",
            "Retries not made because the retry budget was spent.",
            registry=registry,
        )
        self.refused = Counter(
            f"{prefix}_refused",
            "Requests that admission turned away, by the reason.",
            ["model", "reason"],
            registry=registry,
        )
        self.splits = Counter(
            f"{prefix}_splits",
            "Requests of models with prefill engines, by what became of their prompts: split, short, failed,"
            " no_prefill_engine.",
            ["model", "outcome"],
            registry=registry,
        )
        self.hedges = Counter(
            f"{prefix}_hedges",
            "Short requests for which a second engine was asked, or would have been: won, lost, over_budget.",
            ["model", "outcome"],
            registry=registry,
        )
        self.resumed = Counter(
            f"{prefix}_resumed",
            "Streams broken after a part of the answer, by what became of the rest: resumed, ended, refused, failed.",
            ["model", "outcome"],
            registry=registry,
        )
        self.tenant_tokens = Counter(
            f"{prefix}_tenant_tokens",
            "Tokens of answers, by the tenant of the API key.",
            ["tenant"],
            registry=registry,
        )
        self.picks = Counter(
            f"{prefix}_picks", "Requests sent to an engine.", ["model", "engine"], registry=registry
        )
        self.ejections = Counter(
            f"{prefix}_ejections",
            "Times an engine left the rotation because it could not be used.",
            ["model"],
            registry=registry,
        )
        self.first_message = Histogram(
            f"{prefix}_first_message_seconds",
            "From a Generate call's arrival to the first message sent back, in seconds.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.overhead = Histogram(
            f"{prefix}_overhead_seconds",
            "From a Generate or Embed call's arrival to its first dispatch to an engine, in seconds.",
            ["model"],
            buckets=_OVERHEAD_SECONDS,
            registry=registry,
        )

        self._of_model: dict[str, ModelSeries] = {}
        self._of_end: dict[tuple[str, str, grpc.StatusCode], Counter] = {}

    def of(self, model: str) -> ModelSeries:
        """The series of ``model``, looked up once: a lookup costs more than the counting."""
        found = self._of_model.get(model)
        if found is None:
            found = self._of_model[model] = ModelSeries(
                in_flight=self.in_flight.labels(model),
                first_message=self.first_message.labels(model),
                overhead=self.overhead.labels(model),
            )
        return found

    def watch(self, pool: EnginePool) -> None:
        """Also report the engines of ``pool``, read at each scrape."""
        self.registry.register(_PoolCollector(pool))

    def ended(self, model: str, method: str, code: grpc.StatusCode) -> None:
        """A call of ``method`` ended with ``code``."""
        key = (model, method, code)
        found = self._of_end.get(key)
        if found is None:
            found = self._of_end[key] = self.requests.labels(model, method, outcome_of(code), code.name)
        found.inc()

    def on_refused(self, model: str, reason: NoEngineReason) -> None:
        """Count a request that was turned away."""
        self.refused.labels(model, reason.value).inc()

    def on_split(self, model: str, outcome: str) -> None:
        """Count a request that was, or was not, split."""
        self.splits.labels(model, outcome).inc()

    def on_hedge(self, model: str, outcome: str) -> None:
        """Count a hedge."""
        self.hedges.labels(model, outcome).inc()

    def on_resume(self, model: str, outcome: str) -> None:
        """Count a stream that broke."""
        self.resumed.labels(model, outcome).inc()

    def on_state(self, member: Member, old: MemberState, reason: str) -> None:
        """Count an engine that became unusable."""
        if member.state is MemberState.SUSPECT:
            self.ejections.labels(member.endpoint.model).inc()

    def on_pick(self, member: Member) -> None:
        """Count a pick."""
        self.picks.labels(member.endpoint.model, member.engine_id).inc()

    def on_leave(self, member: Member) -> None:
        """Drop the series of an engine that will not come back."""
        with suppress(KeyError):  # it was never picked
            self.picks.remove(member.endpoint.model, member.engine_id)


class _PoolCollector(Collector):
    """Engine gauges, computed at scrape time, so that none outlives its engine."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model", "engine"]
        state = GaugeMetricFamily(
            "npufleet_router_engine_state", "1 for the state an engine is in.", labels=[*labels, "state"]
        )
        in_flight = GaugeMetricFamily(
            "npufleet_router_engine_in_flight", "Requests of this router on an engine.", labels=labels
        )
        queued = GaugeMetricFamily(
            "npufleet_router_engine_queued_tokens",
            "Prompt tokens of this router's requests that have no output yet.",
            labels=labels,
        )
        age = GaugeMetricFamily(
            "npufleet_router_engine_report_age_seconds", "Age of an engine's last load report.", labels=labels
        )
        for member in (*self._pool.members(), *self._pool.leaving()):
            key = [member.endpoint.model, member.engine_id]
            for each in MemberState:
                state.add_metric([*key, each.value], float(member.state is each))
            in_flight.add_metric(key, member.in_flight)
            queued.add_metric(key, sum(ledger.queued_tokens for ledger in member.ledgers))
            ages = [ledger.report_age() for ledger in member.ledgers]
            if told := [seconds for seconds in ages if seconds is not None]:
                age.add_metric(key, max(told))
        yield from (state, in_flight, queued, age)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing in advance: registering must not need a running pool."""
        return iter(())
