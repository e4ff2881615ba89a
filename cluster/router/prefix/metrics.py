"""Prometheus series of what the router knows of prefix caches and paces, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from npufleet.cluster.router.picker import Picker


class PrefixCollector(Collector):
    """Series of one picker. Where the policy reads no KV events there are none about them."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    def collect(self) -> Iterator[Metric]:
        """The values now."""
        one, each = ["model"], ["model", "engine"]
        prefix = "npufleet_router"
        blocks = GaugeMetricFamily(
            f"{prefix}_prefix_blocks", "Distinct prefix blocks in the index.", labels=one
        )
        expected = GaugeMetricFamily(
            f"{prefix}_prefix_expected_blocks", "Prefix blocks of requests under way.", labels=one
        )
        orphans = CounterMetricFamily(
            f"{prefix}_prefix_orphans", "Stored blocks whose parent the index does not know.", labels=one
        )
        followed = GaugeMetricFamily(
            f"{prefix}_engine_events",
            "1 where an engine's KV events arrive; 0: its cache counts as empty.",
            labels=each,
        )
        held = GaugeMetricFamily(
            f"{prefix}_engine_prefix_blocks", "Prefix blocks that an engine says it holds.", labels=each
        )
        pace = GaugeMetricFamily(
            f"{prefix}_engine_token_seconds",
            "Learnt seconds per prompt token that an engine computes; the mean of its data-parallel ranks.",
            labels=each,
        )
        decider, pool = self._picker.decider, self._picker.pool
        members = pool.members()
        for model in dict.fromkeys(member.endpoint.model for member in members):
            index = decider.index(model)
            if index is not None:
                blocks.add_metric([model], index.blocks)
                expected.add_metric([model], index.expected)
                orphans.add_metric([model], index.orphans)
        for member in members:
            key = [member.endpoint.model, member.engine_id]
            index = decider.index(member.endpoint.model)
            if index is not None:
                followed.add_metric(key, float(member.engine_id in self._picker.events.following))
                held.add_metric(key, sum(index.engine_blocks(one.engine_id) for one in member.ledgers))
            paces = decider.paces(member.endpoint.model)
            learnt = [paces.of(ledger.engine_id) for ledger in member.ledgers]
            if known := [one.token for one in learnt if one.known]:
                pace.add_metric(key, fmean(known))
        yield from (blocks, expected, orphans, followed, held, pace)

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: registering must not need a running pool."""
        return iter(())
