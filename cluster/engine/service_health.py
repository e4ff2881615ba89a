"""grpc.health.v1 of one engine: SERVING while the engine answers and is not draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from smg_grpc_servicer.health_frame import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthFrame
from vllm.v1.engine.exceptions import EngineDeadError

from .service_rpc import SERVICE_NAME

WATCH_INTERVAL_S = 0.5
"""How often a Watch looks at the engine, seconds: the longest delay before a change is told."""


class EngineHealth(HealthFrame):
    """Health of the whole server (``""``) and of the engine service; both follow the engine.

    ``Check`` of an unknown name is NOT_FOUND. ``Watch`` stays open and tells every change, as the protocol
    asks.
    """

    ENGINE_SERVICE = SERVICE_NAME

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stopping = False

    def stop_serving(self) -> None:
        """Answer NOT_SERVING from now on."""
        self._stopping = True

    def shutting_down(self) -> bool:
        return self._stopping

    async def engine_status(self, service_name: str) -> int:
        try:
            await self._engine.check_health()
        except EngineDeadError:
            return NOT_SERVING
        return SERVING

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and every change until the caller goes away."""
        told: int | None = None
        while True:
            status = await self.status_of(request.service)
            if status is None:
                status = SERVICE_UNKNOWN
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_INTERVAL_S)
