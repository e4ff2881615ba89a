"""Serve one engine over gRPC: VllmEngine, grpc.health.v1 and reflection on one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ..addresses import netloc
from ..proto.extension import METADATA_LIMIT
from ..tls import ServerTls
from .service_health import EngineHealth
from .service_rpc import SERVICE_NAME, EngineService

__all__ = ["EngineServer", "EngineService", "ServiceSettings", "serve_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Limits of an engine's gRPC server."""

    max_message_bytes: int = 64 * 1024 * 1024  # one request or response
    max_concurrent_rpcs: int = 4096  # above it: RESOURCE_EXHAUSTED
    keepalive_s: float = 20.0  # how often a silent client is pinged
    keepalive_timeout_s: float = 10.0  # how long it may take to answer before its streams are dropped

    def options(self) -> list[tuple[str, int]]:
        """The grpc.aio server options."""
        return [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # The soft limit (8 KiB by default) refuses at random between itself and the absolute one.
            ("grpc.max_metadata_size", METADATA_LIMIT),
            ("grpc.absolute_max_metadata_size", METADATA_LIMIT),
            ("grpc.keepalive_time_ms", int(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1000)),
            # Gateways ping often, also while nothing streams, so that a frozen engine is noticed in seconds.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
        ]


class EngineServer:
    """A running engine service: where it listens, and how to end it."""

    def __init__(
        self, server: grpc.aio.Server, service: EngineService, health: EngineHealth, host: str, port: int,
    ) -> None:  # fmt: skip
        self.service = service
        self.host = host
        self.port = port
        self._server = server
        self._health = health

    @property
    def address(self) -> str:
        """host:port that clients dial."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def active(self) -> int:
        """Generate streams open now."""
        return self.service.active

    @property
    def last_token(self) -> float:
        """When the last part of any answer was sent, seconds on the monotonic clock; 0 before the first."""
        return self.service.last_token

    async def drain(self, deadline_s: float = 30.0) -> int:
        """Stop taking requests, let the running ones end, then stop the server.

        Health turns NOT_SERVING first; new Generate calls get UNAVAILABLE; streams still open after
        ``deadline_s`` seconds are cut. Returns how many were cut.
        """
        self._health.stop_serving()
        self.service.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.service.idle.wait()
        cut = self.service.active
        if cut:
            logger.warning("%d streams still open after %.1f s of drain are cut", cut, deadline_s)
        await self.service.stop_events()
        await self._server.stop(grace=0.1)
        return cut

    async def stop(self) -> None:
        """Stop at once: running streams are cut. The AsyncLLM is left running; it belongs to the caller."""
        await self.drain(deadline_s=0.0)


async def serve_engine(
    async_llm: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    settings: ServiceSettings | None = None,
    guard: grpc.aio.ServerInterceptor | None = None,
    tls: ServerTls | None = None,
) -> EngineServer:
    """Serve ``async_llm`` (vLLM's AsyncLLM, running in this event loop) on ``host:port``; port 0 picks one.

    ``guard`` decides who may call it; None: everybody who reaches the port. With ``tls`` the port speaks nothing else.

    Raises ``OSError`` when the address cannot be bound, ``ValueError`` for TLS files that cannot be used. The stock
    servicer's warm-up is not run.
    """
    settings = settings or ServiceSettings()
    server = grpc.aio.server(
        interceptors=() if guard is None else (guard,),
        options=settings.options(),
        maximum_concurrent_rpcs=settings.max_concurrent_rpcs,
    )
    service = EngineService(async_llm)
    health = EngineHealth(async_llm)
    pb_grpc.add_VllmEngineServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    target = netloc(host, port)
    try:
        if tls is not None:
            bound = server.add_secure_port(target, tls.credentials())
        else:
            bound = server.add_insecure_port(target)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {target} for the engine service: {error}") from error
    service.start_events()
    await server.start()
    logger.info("engine service %s on %s", SERVICE_NAME, f"{host}:{bound}")
    return EngineServer(server, service, health, host, bound)
