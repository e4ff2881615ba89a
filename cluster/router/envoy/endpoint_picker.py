"""The Endpoint Picker: ``envoy.service.ext_proc.v3.ExternalProcessor``, so that any gateway which speaks the
Endpoint Picker Protocol can ask our picker.

Source: Gateway API Inference Extension, proposal 004, version 1.0.0. The engine is told in the header and in the
dynamic metadata ``envoy.lb``; a subset that the gateway gives is kept to; who served is read from the response.
Body modes: FULL_DUPLEX_STREAMED and BUFFERED let the picker see the prompt; in the others it decides on headers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf import struct_pb2

from npufleet.cluster.addresses import netloc
from npufleet.cluster.proto import envoy_pb2 as pb
from npufleet.cluster.router.away import Away
from npufleet.cluster.router.call import CallError
from npufleet.cluster.router.envoy.ask import Asked, Placed
from npufleet.cluster.router.envoy.ended import PASSED_OVER
from npufleet.cluster.router.envoy.settings import DESTINATION_KEY
from npufleet.cluster.router.parsing import parsed

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_NAMESPACE = "envoy.lb"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_Code = grpc.StatusCode
_Mode = pb.ProtocolConfiguration
_BY_NUMBER = {code.value[0]: code for code in _Code}
_HTTP = {
    _Code.INVALID_ARGUMENT: 400,
    _Code.NOT_FOUND: 404,
    _Code.RESOURCE_EXHAUSTED: 429,
    _Code.UNIMPLEMENTED: 501,
}
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class EndpointPicker:
    """The service of one router."""

    def __init__(self, asked: Asked, max_bytes: int) -> None:
        self._asked = asked
        self._max_bytes = max_bytes

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server adds."""
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    async def _process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProcessingResponse]:
        exchange = _Exchange(self._asked, self._max_bytes)
        try:
            async for raw in requests:
                request = await parsed(pb.ProcessingRequest, raw, context)
                for response in await exchange.take(request):
                    yield response
        finally:
            exchange.close()


class _Exchange:
    """One HTTP request of the gateway."""

    def __init__(self, asked: Asked, max_bytes: int) -> None:
        self._asked = asked
        self._most = max_bytes + 5
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._mode = _Mode.NONE
        self._refused: frozenset[str] = frozenset()  # engines outside the gateway's subset
        self._away: Away | None = None
        self._code: grpc.StatusCode | None = None  # as its response told
        self._elsewhere = False  # another engine than the one meant has served

    def close(self) -> None:
        """The gateway is done with the request."""
        if self._away is not None:
            code = self._code or _Code.CANCELLED
            self._asked.away.ended(self._away.id, code, engine=PASSED_OVER if self._elsewhere else code)

    async def take(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """The answers to one message of the gateway."""
        kind = request.WhichOneof("request")
        try:
            match kind:
                case "request_headers":
                    return await self._request_headers(request)
                case "request_body":
                    return await self._request_body(request.request_body)
                case "request_trailers":
                    return [pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        except CallError as error:
            return [refusal(error)]
        self._served(request.metadata_context)
        match kind:
            case "response_headers":
                return self._response_headers(request.response_headers)
            case "response_body":
                return [self._response_body(request)]
            case "response_trailers":
                self._end(request.response_trailers.trailers)
                return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        return []

    async def _request_headers(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self._headers = dict(pairs(request.request_headers.headers))
        self._mode = request.protocol_config.request_body_mode
        self._refused = self._outside(request.metadata_context)
        if request.request_headers.end_of_stream or self._mode not in (
            _Mode.BUFFERED,
            _Mode.FULL_DUPLEX_STREAMED,
        ):
            placed = await self._place(None)
            return [with_destination(placed, "request_headers")]
        if self._mode == _Mode.BUFFERED:
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        return []  # the answer to the headers waits for the prompt

    async def _request_body(self, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if self._mode not in (_Mode.BUFFERED, _Mode.FULL_DUPLEX_STREAMED):
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._size += len(body.body)
        if self._size > self._most:
            raise CallError(_Code.RESOURCE_EXHAUSTED, f"the request is longer than {self._most - 5} bytes")
        self._parts.append(body.body)
        if not body.end_of_stream:
            return []
        parts, self._parts = self._parts, []
        placed = await self._place(b"".join(parts))
        if self._mode == _Mode.BUFFERED:
            return [with_destination(placed, "request_body")]
        last = len(parts) - 1
        echoes = [echo("request_body", part, i == last) for i, part in enumerate(parts)]
        return [with_destination(placed, "request_headers"), *echoes]

    async def _place(self, body: bytes | None) -> Placed:
        placed = await self._asked.place(
            self._headers.get(":path", ""), self._headers, body, excluded=self._refused
        )
        self._away = placed.away
        return placed

    def _outside(self, metadata: pb.Metadata) -> frozenset[str]:
        """The engines that the gateway does not allow."""
        hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
        if hint is None or SUBSET_KEY not in hint.fields:
            return frozenset()
        given = hint.fields[SUBSET_KEY]
        items = [given] if given.WhichOneof("kind") == "string_value" else given.list_value.values
        allowed = {part.strip() for item in items for part in item.string_value.split(",")}
        known = self._asked.engines.known()
        return frozenset(engine for engine, address in known.items() if netloc(*address) not in allowed)

    def _served(self, metadata: pb.Metadata) -> None:
        told = metadata.filter_metadata.get(SERVED_NAMESPACE)
        if told is None or self._away is None or SERVED_KEY not in told.fields:
            return
        meant = self._asked.engines.get(self._away.lease.endpoint.engine_id)
        served = told.fields[SERVED_KEY].string_value
        self._elsewhere = bool(served) and meant is not None and served != netloc(*meant)

    def _response_headers(self, headers: pb.HttpHeaders) -> list[pb.ProcessingResponse]:
        found = dict(pairs(headers.headers))
        if "grpc-status" in found:
            self._end(headers.headers)
        elif self._away is not None:
            self._asked.away.started(self._away.id)
        return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]

    def _response_body(self, request: pb.ProcessingRequest) -> pb.ProcessingResponse:
        body = request.response_body
        if self._mode == _Mode.FULL_DUPLEX_STREAMED:  # a gateway uses one mode both ways
            return echo("response_body", body.body, body.end_of_stream)
        return pb.ProcessingResponse(response_body=pb.BodyResponse())

    def _end(self, trailers: pb.HeaderMap) -> None:
        number = dict(pairs(trailers)).get("grpc-status", "")
        if number.isdigit():
            self._code = _BY_NUMBER.get(int(number), _Code.UNKNOWN)


def pairs(headers: pb.HeaderMap) -> Iterator[tuple[str, str]]:
    """Names and values; Envoy puts a value into one of two fields."""
    for header in headers.headers:
        yield header.key, header.value or header.raw_value.decode("latin-1")


def with_destination(placed: Placed, phase: str) -> pb.ProcessingResponse:
    """The answer that carries the engine, to the ``phase`` request_headers or request_body."""
    mutation = pb.HeaderMutation(
        set_headers=[_set(key, value) for key, value in placed.headers],
    )
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=False)
    kind: Any = pb.HeadersResponse if phase == "request_headers" else pb.BodyResponse
    told = struct_pb2.Struct()
    told.update({SERVED_NAMESPACE: {DESTINATION_KEY: dict(placed.headers)[DESTINATION_KEY]}})
    return pb.ProcessingResponse(**{phase: kind(response=common)}, dynamic_metadata=told)


def echo(phase: str, body: bytes, last: bool) -> pb.ProcessingResponse:
    """A piece of body, passed on as it came."""
    piece = pb.StreamedBodyResponse(body=body, end_of_stream=last)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
    return pb.ProcessingResponse(**{phase: pb.BodyResponse(response=common)})


def refusal(error: CallError) -> pb.ProcessingResponse:
    """The client's answer where no engine is picked."""
    headers = [_set(key, value) for key, value in error.trailing if isinstance(value, str)]
    answer = pb.ImmediateResponse(
        status=pb.HttpStatus(code=_HTTP.get(error.code, 503)),
        headers=pb.HeaderMutation(set_headers=headers),
        body=error.details.encode(),
        grpc_status=pb.GrpcStatus(status=error.code.value[0]),
        details="npufleet_picker",
    )
    return pb.ProcessingResponse(immediate_response=answer)


def _set(key: str, value: str) -> pb.HeaderValueOption:
    header = pb.HeaderValue(key=key, raw_value=value.encode())
    return pb.HeaderValueOption(header=header, append_action=_OVERWRITE)
