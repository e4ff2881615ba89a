"""The router's face: the same ``vllm.grpc.engine.VllmEngine`` that each engine serves.

A client of one engine works against the router unchanged, and gets the fleet as one big engine.
"""

from __future__ import annotations

from functools import partial

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from npufleet.cluster.access import AccessLog
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.router.away import AwayRequests
from npufleet.cluster.router.call import Body, Surroundings, handler
from npufleet.cluster.router.control import Control
from npufleet.cluster.router.health import HEALTH_SERVICE, HealthService
from npufleet.cluster.router.lookaside.service import SERVICE as LOOKASIDE
from npufleet.cluster.router.lookaside.service import Lookaside
from npufleet.cluster.router.metrics import RouterMetrics
from npufleet.cluster.router.picker import Picker
from npufleet.cluster.router.relay import Relay
from npufleet.cluster.router.requests import LiveRequests
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import METHODS, SERVICE
from npufleet.cluster.tracing import Tracing
from npufleet.cluster.transport.http2.server import Http2Server


class Front:
    """The gRPC services of one router."""

    def __init__(self, picker: Picker, metrics: RouterMetrics, settings: RouterSettings, keys: Keys) -> None:
        tracing = Tracing("npufleet-router", settings.otlp_endpoint)
        self._around = Surroundings(
            metrics=metrics, keys=keys, access=AccessLog(settings.access_log), tracing=tracing
        )
        self.live = LiveRequests()
        self.health = HealthService(picker.pool)
        self.control = Control(picker, self.live, settings)
        self.relay = Relay(picker, self.live, metrics, settings)
        self.away = AwayRequests(picker, self.live, metrics, settings)
        self.lookaside = Lookaside(picker, self.away, settings, keys)

    def add_to(self, server: grpc.aio.Server | Http2Server) -> None:
        """Register VllmEngine, Lookaside, health and reflection; requests elsewhere are watched from now on."""
        self.away.start()
        bodies = self._bodies()
        assert bodies.keys() == METHODS.keys(), "each method of the service has one place that answers it"
        handlers = {name: self._handler(name, body) for name, body in bodies.items()}
        own = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((own, self.lookaside.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = (SERVICE, LOOKASIDE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        described = reflection.aio.ReflectionServicer(
            names
        )  # what enable_server_reflection makes for grpcio's alone
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, server)

    def begin_close(self) -> None:
        """Say that this router no longer serves and end the streams that never end by themselves."""
        self.health.close()
        self.control.end_subscriptions()
        self.away.close()
        self._around.tracing.close()

    def _bodies(self) -> dict[str, Body]:
        one, every = self.control.ask_one, self.control.tell_all
        return {
            "Generate": self.relay.generate,
            "Embed": self.relay.embed,
            "Abort": self.control.abort,
            "HealthCheck": self.control.health_check,
            "GetLoads": self.control.get_loads,
            "GetTokenizer": self.control.get_tokenizer,
            "SubscribeKvEvents": self.control.subscribe_kv_events,
            **{name: partial(one, name) for name in ("GetModelInfo", "GetServerInfo")},
            **{name: partial(every, name) for name in ("FlushCache", "StartProfile", "StopProfile")},
        }

    def _handler(self, name: str, body: Body) -> grpc.RpcMethodHandler:
        kind = (
            grpc.unary_stream_rpc_method_handler
            if METHODS[name].server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return kind(handler(name, body, self._around))  # no serializers: messages stay bytes
