"""A Prometheus endpoint on a port of its own, in a thread, so that a busy event loop cannot make it late."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from ..addresses import netloc, reachable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A running endpoint."""

    url: str
    _server: WSGIServer
    _thread: Thread

    def stop(self) -> None:
        """Stop serving and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def start(
    host: str, port: int = 0, registry: CollectorRegistry | None = None, *, node_address: str = "127.0.0.1"
) -> Exporter:
    """Serve ``registry`` (the process's default one if None) at ``http://host:port/metrics``; port 0 takes
    a free one.

    ``node_address`` stands in the URL where ``host`` is a wildcard.

    Raises:
        OSError: if the port cannot be bound.
    """
    from prometheus_client import REGISTRY, start_http_server

    server, thread = start_http_server(port, addr=host, registry=registry or REGISTRY)
    url = f"http://{netloc(reachable(host, node_address), server.server_port)}/metrics"
    return Exporter(url=url, _server=server, _thread=thread)
