"""Routers and gateways that the controller has heard of: for service discovery and the status."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .gone import refuses
from .registry import EXPIRY_S, SILENT_S

GATEWAY = "gateway"
"""The component of which each front end has one."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One router or gateway."""

    component: str
    metrics_url: str
    heard: float  # the last time, seconds on a monotonic clock


@dataclass(kw_only=True)
class Services:
    """Services by id. Nothing is written to disk: each repeats itself with every heartbeat."""

    _known: dict[str, Service] = field(default_factory=dict)

    def heard(self, service_id: str, component: str, metrics_url: str, now: float) -> None:
        """Register a service, or keep it alive."""
        self._known[service_id] = Service(component=component, metrics_url=metrics_url, heard=now)

    def remove(self, service_id: str) -> None:
        """Forget a service and what belongs to it (``ID-…``); unknown ones are ignored."""
        for known in [
            name for name in self._known if name == service_id or name.startswith(f"{service_id}-")
        ]:
            del self._known[known]

    async def sweep(self, now: float, fair: bool = True) -> None:
        """Forget those that are silent and whose port is closed, and, if it is ``fair``, those that were silent for
        ``EXPIRY_S``.
        """
        silent = {name: it for name, it in self._known.items() if now - it.heard > SILENT_S}
        refused = await asyncio.gather(*(refuses(urlsplit(it.metrics_url).netloc) for it in silent.values()))
        for (name, service), gone in zip(silent.items(), refused, strict=True):
            if (gone or (fair and now - service.heard > EXPIRY_S)) and self._known.get(name) is service:
                del self._known[name]

    def targets(self) -> list[tuple[str, str]]:
        """Return component and metrics URL of each."""
        return [(service.component, service.metrics_url) for service in self._known.values()]

    def front_ends(self) -> int:
        """Return how many front ends serve now."""
        return sum(service.component == GATEWAY for service in self._known.values())
