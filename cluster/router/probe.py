"""How the router asks an engine about itself: the health check, the load report."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.wire import path, pb
from npufleet.cluster.transport.base import EngineChannel
from npufleet.cluster.transport.closed import closed_is_unavailable


class HealthProbe:
    """Asks ``grpc.health.v1.Health/Check``, or ``VllmEngine/HealthCheck`` of an engine without that service.

    Check rather than Watch: the stock engine servicer answers a Watch once and ends it, and a broken
    connection is seen on the channel anyway.
    """

    def __init__(self, channel: EngineChannel, timeout: float) -> None:
        self._timeout = timeout
        self._standard = True
        self._check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self._engine_check = channel.unary_unary(
            path("HealthCheck"),
            request_serializer=pb.HealthCheckRequest.SerializeToString,
            response_deserializer=pb.HealthCheckResponse.FromString,
        )

    async def __call__(self) -> str:
        """What is wrong with the engine, or "" where it serves; TimeoutError for a late answer."""
        try:
            with closed_is_unavailable():
                return await (self._ask_standard() if self._standard else self._ask_engine())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED and self._standard:
                self._standard = False
                return await self()
            return f"health check: {error.code().name}: {error.details()}"

    async def _ask_standard(self) -> str:
        answer = await self._check(health_pb2.HealthCheckRequest(), timeout=self._timeout)
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if serving else "health check: it answers that it does not serve"

    async def _ask_engine(self) -> str:
        answer = await self._engine_check(pb.HealthCheckRequest(), timeout=self._timeout)
        return "" if answer.healthy else f"health check: {answer.message or 'not healthy'}"


def sum_loads(loads: Sequence[pb.SchedulerLoad]) -> LoadReport:
    """One report for all of ``loads`` (at least one), data-parallel ranks that are not told apart."""
    return LoadReport(
        running=sum(max(0, load.num_running_reqs) for load in loads),
        waiting=sum(max(0, load.num_waiting_reqs) for load in loads),
        waiting_tokens=sum(max(0, load.num_waiting_uncached_tokens) for load in loads),
        kv_usage=sum(load.token_usage for load in loads) / len(loads),
    )
