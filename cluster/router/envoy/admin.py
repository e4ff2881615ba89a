"""Envoy's administration interface over its Unix socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Admin:
    """Questions to one Envoy. Each raises OSError or ``aiohttp.ClientError`` where it does not answer."""

    def __init__(self, where: Path) -> None:
        self._where = where

    async def ready(self) -> bool:
        """True once Envoy serves: it has its listeners and its first set of engines."""
        async with self._session() as session, session.get("http://envoy/ready") as answer:
            return answer.status == 200

    async def port(self) -> int:
        """The port that the listener got."""
        async with self._session() as session, session.get("http://envoy/listeners?format=json") as answer:
            found: dict[str, Any] = await answer.json(content_type=None)
        return int(found["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])

    async def active(self) -> int:
        """Requests under way."""
        query = "http://envoy/stats?filter=^http.ingress.downstream_rq_active$"
        async with self._session() as session, session.get(query) as answer:
            text = await answer.text()
        return int(text.partition(":")[2] or 0)

    async def metrics(self) -> str:
        """All its series, in the format of Prometheus."""
        async with self._session() as session, session.get("http://envoy/stats/prometheus") as answer:
            return await answer.text()

    async def drain(self) -> None:
        """Take no new connection, and ask clients to leave (GOAWAY); running requests go on."""
        for path in ("healthcheck/fail", "drain_listeners?graceful&skip_exit"):
            async with self._session() as session, session.post(f"http://envoy/{path}") as answer:
                answer.raise_for_status()

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(str(self._where))
        return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
