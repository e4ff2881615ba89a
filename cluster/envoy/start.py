"""Put an Envoy before a running router."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass

from npufleet.cluster.addresses import netloc
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.envoy.config import Plan
from npufleet.cluster.envoy.picker import EnvoyPicker
from npufleet.cluster.envoy.process import Envoy
from npufleet.cluster.router.server import RouterHandle
from npufleet.cluster.tls import ServerTls

_LONGER = 5.0  # seconds that Envoy waits for the picker beyond what a request may wait in it


@dataclass(kw_only=True, eq=False)
class EnvoyHandle:
    """A running Envoy and the picker that it asks."""

    host: str
    port: int
    picker: EnvoyPicker
    envoy: Envoy

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return netloc(self.host, self.port)


async def serve_envoy(
    router: RouterHandle,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    keys: Keys | None = None,
    tls: ServerTls | None = None,
    workers: int = 1,
) -> EnvoyHandle:
    """Start Envoy on ``host`` and ``port`` (0 takes a free one) before ``router``, which listens on loopback.

    ``workers`` are Envoy's threads. OSError where it does not come up, ValueError where it is not installed.
    """
    if tls is not None:
        tls.check()
    settings = router.picker.pool.settings
    picker = EnvoyPicker(router.picker, router.metrics, keys or Keys(()))
    plan = Plan(
        host=host,
        port=port or _free_port(host),
        picker_port=await picker.start(),
        router_port=router.port,
        directory=Envoy.directory(),
        max_request_bytes=settings.max_request_bytes,
        ask_timeout=settings.admission.queue_timeout + _LONGER,
        call_timeout=settings.request_timeout,
        link=settings.link(),
        tls=tls,
        engine_tls=settings.tls,
    )
    envoy = Envoy(plan, picker, router.picker.pool, workers)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(envoy.close, 0.0)
        await envoy.start()
        undo.pop_all()
    return EnvoyHandle(host=host, port=plan.port, picker=picker, envoy=envoy)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
