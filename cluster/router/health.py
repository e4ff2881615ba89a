"""grpc.health.v1 of the router.

Service "" and the VllmEngine service serve while each known model has an engine that can take a request; a
model's own name is a service too. Everything stops serving when the router begins to close.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npufleet.cluster.router.pool import EnginePool
from npufleet.cluster.router.wire import SERVICE

_Status = health_pb2.HealthCheckResponse
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers from the pool's state, and pushes each change to watchers."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._closing = False
        self._news = asyncio.Event()
        pool.listen(self._tell)

    def close(self) -> None:
        """Stop serving; watchers are told and their streams end."""
        self._closing = True
        self._tell()

    def status(self, service: str) -> int:
        """The status of ``service``; SERVICE_UNKNOWN where there is none of that name."""
        ready = self._pool.models()
        if service in ("", SERVICE):
            serves = bool(ready) and all(ready.values())
        elif service in ready:
            serves = ready[service] > 0
        else:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if serves and not self._closing else _Status.NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for an unknown service, as the protocol asks."""
        status = self.status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            names = ", ".join(["''", SERVICE, *self._pool.models()])
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service[:200]!r}; there is: {names}"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """The status of every service."""
        services = ["", SERVICE, *self._pool.models()]
        statuses = {name: health_pb2.HealthCheckResponse(status=self.status(name)) for name in services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and after each change, until the router closes."""
        last = None
        while True:
            news, closing = self._news, self._closing  # both may change while a status is sent
            status = self.status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if closing:
                return
            await news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
