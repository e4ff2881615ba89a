"""Health of the Endpoint Picker as its protocol asks for it (grpc.health.v1).

``liveness``: this process answers. ``readiness``, the service itself and "": a first set of engines is known and
each model has one that can take a request. Every router decides for itself, so there is no leader.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npufleet.cluster.router.envoy.endpoint_picker import SERVICE
from npufleet.cluster.router.pool import EnginePool

LIVENESS, READINESS = "liveness", "readiness"
_STATUS = health_pb2.HealthCheckResponse


class PickerHealth(health_pb2_grpc.HealthServicer):
    """``grpc.health.v1.Health`` beside the Endpoint Picker."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a name that is none of the above."""
        if request.service == LIVENESS:
            return _STATUS(status=_STATUS.SERVING)
        if request.service not in ("", READINESS, SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        models = self._pool.models()
        ready = bool(models) and all(models.values())
        return _STATUS(status=_STATUS.SERVING if ready else _STATUS.NOT_SERVING)
