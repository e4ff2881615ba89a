"""The controller's HTTP port: ``/sd`` for Prometheus, ``/status``, ``/metrics``, ``/health``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..addresses import netloc, reachable
from .series import ControllerSeries

if TYPE_CHECKING:
    from .deployment import Controller

logger = logging.getLogger(__name__)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Leave one line of a request that is no HTTP: it is the client's fault, and anybody can send a thousand."""
    fault = record.exc_info[1] if record.exc_info else None
    if isinstance(fault, BadHttpMessage):
        reason = (fault.message or type(fault).__name__).splitlines()[0]
        record.msg, record.args = f"{record.getMessage()}: {reason[:200]}", ()
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return record.levelno >= logger.getEffectiveLevel()


logger.addFilter(_without_traceback)


class ControllerHttp:
    """Serves what the controller knows; every answer is computed when asked for."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._registry = CollectorRegistry()
        self._registry.register(
            ControllerSeries(
                lambda: controller.changes.wish, controller.registry, controller.progress, controller.health
            )
        )
        self._runner: web.AppRunner | None = None
        self.metrics_url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen on ``host:port``; port 0 takes a free one. Raises ``OSError`` if the port is taken."""
        app = web.Application()
        app.router.add_get("/sd", self._targets)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=logger)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        address = self._runner.addresses[0]
        node = ray.util.get_node_ip_address()
        self.metrics_url = f"http://{netloc(reachable(address[0], node), address[1])}/metrics"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _targets(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controller.targets())

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._controller.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
