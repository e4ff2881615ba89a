"""The series of several processes read at one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import aiohttp
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

_log = logging.getLogger(__name__)
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def collect(sockets: Mapping[str, Path]) -> bytes:
    """Ask each process for its series over its Unix socket and give all of them the label ``process``.

    A process that does not answer is left out.
    """
    texts = await asyncio.gather(*(_ask(where) for where in sockets.values()))
    return merge({name: text for name, text in zip(sockets, texts, strict=True) if text})


def merge(texts: Mapping[str, str]) -> bytes:
    """Series in the format of Prometheus, by process, as one text."""
    families: dict[str, Metric] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "process": process}
                known.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _ask(where: Path) -> str:
    try:
        connector = aiohttp.UnixConnector(str(where))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session,
            session.get("http://router/metrics") as answer,
        ):
            return await answer.text()
    except (OSError, aiohttp.ClientError) as error:
        _log.warning("a router process does not tell its series: %s", error)
        return ""
