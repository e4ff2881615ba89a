"""Service discovery for Prometheus: every target of the fleet in the ``http_sd`` format.

Format: https://prometheus.io/docs/prometheus/latest/http_sd/ (a JSON list of ``{"targets": [...], "labels":
{...}}``). ``__metrics_path__`` is the label that tells Prometheus the path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ..endpoints import EngineEndpoint


def target(url: str, fleet: str, component: str, **labels: str) -> dict[str, Any]:
    """Return one target group for a metrics URL such as ``http://10.0.0.1:9000/metrics``.

    Raises:
        ValueError: if ``url`` is not an http or https URL with a host and a port.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
        raise ValueError(f"metrics URL {url!r}: expected http://HOST:PORT/PATH")
    named = {"fleet": fleet, "component": component, **labels}
    return {
        "targets": [parts.netloc],
        "labels": {
            "__scheme__": parts.scheme,
            "__metrics_path__": parts.path or "/metrics",
            **{name: value for name, value in named.items() if value},
        },
    }


def engine_target(endpoint: EngineEndpoint, fleet: str) -> dict[str, Any]:
    """Return the target group of one engine, labelled with engine, model, device, role and node."""
    return target(
        endpoint.metrics_url,
        fleet,
        "engine",
        engine_id=endpoint.engine_id,
        model=endpoint.model,
        device=endpoint.device,
        role=endpoint.role,
        node_id=endpoint.node_id,
    )


def targets(
    fleet: str, endpoints: Iterable[EngineEndpoint], services: Iterable[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return all target groups: ``services`` as (component, metrics URL), then every engine with a URL."""
    groups = [target(url, fleet, component) for component, url in services]
    groups += [engine_target(endpoint, fleet) for endpoint in endpoints if endpoint.metrics_url]
    return groups
