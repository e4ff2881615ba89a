"""How the router asks an engine about itself: the link's options, the health check, the load report."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import path, pb


class HealthProbe:
    """Asks ``grpc.health.v1.Health/Check``, or ``VllmEngine/HealthCheck`` of an engine without that service.

    Check rather than Watch: the stock engine servicer answers a Watch once and ends it, and a broken
    connection is seen on the channel anyway.
    """

    def __init__(self, channel: grpc.aio.Channel, timeout: float) -> None:
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


def sum_loads(answer: pb.GetLoadsResponse) -> LoadReport:
    """One report for an engine that answers with one entry per data-parallel rank (at least one)."""
    loads = answer.loads
    return LoadReport(
        running=sum(max(0, load.num_running_reqs) for load in loads),
        waiting=sum(max(0, load.num_waiting_reqs) for load in loads),
        waiting_tokens=sum(max(0, load.num_waiting_uncached_tokens) for load in loads),
        kv_usage=sum(load.token_usage for load in loads) / len(loads),
    )


def channel_options(settings: RouterSettings) -> list[tuple[str, int]]:
    """gRPC channel options of a link to an engine.

    ``grpc.http2.ping_timeout_ms`` is what bounds the discovery of a frozen peer; the keepalive timeout alone
    leaves it at a minute.
    """
    timeout_ms = int(settings.keepalive_timeout * 1000)
    backoff_ms = int(settings.reconnect_backoff * 1000)
    return [
        ("grpc.keepalive_time_ms", int(settings.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", min(100, backoff_ms)),
        ("grpc.min_reconnect_backoff_ms", min(100, backoff_ms)),
        ("grpc.max_reconnect_backoff_ms", backoff_ms),
        ("grpc.enable_retries", 0),  # the router retries, on another engine
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # its own connection, so its own state
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
    ]
