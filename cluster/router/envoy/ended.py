"""Envoy's access log as a stream: how the requests that it carried have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from npufleet.cluster.addresses import netloc
from npufleet.cluster.proto import envoy_pb2
from npufleet.cluster.router.away import AwayRequests
from npufleet.cluster.router.envoy.engines import EngineAddresses
from npufleet.cluster.router.envoy.settings import PICK_KEY
from npufleet.cluster.router.wire import pb as engine_pb

SERVICE = "envoy.service.accesslog.v3.AccessLogService"

_PER_MESSAGE = 5  # bytes that gRPC puts before each message
TOKEN_BYTES = _PER_MESSAGE + len(
    engine_pb.GenerateResponse(
        chunk=engine_pb.GenerateStreamChunk(token_ids=[50_000], prompt_tokens=1000, completion_tokens=200)
    ).SerializeToString()
)
"""Bytes of a usual streamed token: Envoy tells how long an answer was, not how many tokens it had."""

_Code = grpc.StatusCode
PASSED_OVER = _Code.INTERNAL
"""What is said of an engine in whose stead another one answered. Whether it was away or only full is not known, so its
health is looked at, and it rests where that happens again and again."""
_BY_NUMBER = {code.value[0]: code for code in _Code}


class AccessLog:
    """``envoy.service.accesslog.v3.AccessLogService``."""

    def __init__(self, away: AwayRequests, engines: EngineAddresses) -> None:
        self._away = away
        self._engines = engines

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server adds."""
        method = grpc.stream_unary_rpc_method_handler(
            self._stream,
            request_deserializer=envoy_pb2.StreamAccessLogsMessage.FromString,
            response_serializer=envoy_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"StreamAccessLogs": method})

    async def _stream(
        self,
        messages: AsyncIterator[envoy_pb2.StreamAccessLogsMessage],
        context: grpc.aio.ServicerContext,
    ) -> envoy_pb2.StreamAccessLogsResponse:
        async for message in messages:
            for entry in message.http_logs.log_entry:
                self._take(entry)
        return envoy_pb2.StreamAccessLogsResponse()

    def _take(self, entry: envoy_pb2.HttpEntry) -> None:
        away = self._away.get(entry.request.request_headers.get(PICK_KEY, ""))
        if away is None:
            return
        common = entry.common_properties
        code = client_code(entry)
        engine = engine_code(entry, code)
        last = common.upstream_remote_address.socket_address
        meant = self._engines.get(away.lease.endpoint.engine_id)
        if last.address and meant is not None and netloc(last.address, last.port_value) != netloc(*meant):
            engine = PASSED_OVER
        retries = max(0, common.upstream_request_attempt_count - 1)
        tokens = entry.response.response_body_bytes // TOKEN_BYTES
        self._away.ended(away.id, code, engine=engine, retries=retries, tokens=tokens)


def client_code(entry: envoy_pb2.HttpEntry) -> grpc.StatusCode:
    """The status that the request ended with for its client."""
    flags = entry.common_properties.response_flags
    if flags.downstream_connection_termination or flags.downstream_remote_reset:
        return _Code.CANCELLED
    if flags.duration_timeout or flags.upstream_max_stream_duration_reached:
        return _Code.DEADLINE_EXCEEDED
    for headers in (entry.response.response_trailers, entry.response.response_headers):
        number = headers.get("grpc-status", "")
        if number.isdigit():
            return _BY_NUMBER.get(int(number), _Code.UNKNOWN)
    return _Code.UNAVAILABLE if _broken(flags) else _Code.UNKNOWN


def engine_code(entry: envoy_pb2.HttpEntry, seen: grpc.StatusCode) -> grpc.StatusCode:
    """What ``seen``, the client's status, says about the engine: nothing where Envoy made it up by itself."""
    flags = entry.common_properties.response_flags
    if _broken(flags):
        return _Code.UNAVAILABLE
    return _Code.CANCELLED if flags.no_healthy_upstream else seen


def _broken(flags: envoy_pb2.ResponseFlags) -> bool:
    return (
        flags.upstream_connection_failure
        or flags.upstream_connection_termination
        or flags.upstream_remote_reset
        or flags.upstream_protocol_error
    )
