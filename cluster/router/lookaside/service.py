"""``npufleet.Lookaside``: name an engine to a client that speaks to it by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import grpc

from npufleet.cluster.admission.tenants import Keys, Tenant
from npufleet.cluster.proto import lookaside_pb2 as pb
from npufleet.cluster.proto.extension import EXTENSION_KEY, encode
from npufleet.cluster.router.away import AwayRequests
from npufleet.cluster.router.call import NO_KEY, CallError, Metadata
from npufleet.cluster.router.errors import NoEngine
from npufleet.cluster.router.lookaside.tokens import TokenMint
from npufleet.cluster.router.parsing import unary
from npufleet.cluster.router.picker import Lease, Picker, RequestInfo
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.split.base import Params
from npufleet.cluster.router.wire import pb as engine_pb
from npufleet.cluster.router.wire import read_head

SERVICE = pb.DESCRIPTOR.services_by_name["Lookaside"].full_name
TOKEN_SECONDS = 30.0

_Code = grpc.StatusCode
_BY_NUMBER = {code.value[0]: code for code in _Code}
_Event = pb.ReportRequest


class Lookaside:
    """The service of one router. Routes are known to the router that made them."""

    def __init__(self, picker: Picker, away: AwayRequests, settings: RouterSettings, keys: Keys) -> None:
        self._picker = picker
        self._away = away
        self._settings = settings
        self._keys = keys
        self._mint = None if settings.secret is None else TokenMint(settings.secret)

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server adds."""
        methods = {
            "Route": unary(pb.RouteRequest, self._route),
            "Report": unary(pb.ReportRequest, self._report),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _route(self, request: pb.RouteRequest, context: grpc.aio.ServicerContext) -> pb.RouteResponse:
        tenant = await self._tenant(context)
        try:
            info = info_of(request, tenant)
        except ValueError as error:
            await context.abort(_Code.INVALID_ARGUMENT, str(error))
        longest = self._settings.request_timeout
        lasts = min(request.timeout_seconds or longest, longest)
        params: Params | None = None
        try:
            if request.split:
                info, params = await self._split(info, list(request.token_ids), lasts)
            away = await self._away.place(
                "Generate", info, via="lookaside", peer=context.peer(), deadline=lasts
            )
        except NoEngine as error:
            told = CallError.from_no_engine(error)
            await context.abort(told.code, told.details, told.trailing)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or error.code().name)
        endpoint = away.lease.endpoint
        token = "" if self._mint is None else self._mint.route(endpoint.engine_id, away.id, TOKEN_SECONDS)
        return pb.RouteResponse(
            route_id=away.id,
            engine_id=endpoint.engine_id,
            address=endpoint.address,
            token=token,
            token_seconds=TOKEN_SECONDS if token else 0.0,
            accounted_seconds=lasts,
            data_parallel_rank=away.lease.rank,
            kv_transfer_params_json=None if params is None else json.dumps(params),
        )

    async def _split(
        self, info: RequestInfo, token_ids: Sequence[int], seconds: float
    ) -> tuple[RequestInfo, Params | None]:
        """Have the prompt computed apart where it is worth it: the request as it is then, and what to tell its engine.

        Raises :class:`NoEngine` where admission refuses it, ``AioRpcError`` for what the client got wrong.
        """
        info = replace(info, model=self._picker.pool.resolve(info.model))
        if not token_ids:
            return info, None
        request = engine_pb.GenerateRequest(request_id=info.request_id)
        request.tokenized.input_ids.extend(token_ids)
        extension = encode({"cache_salt": info.cache_salt} if info.cache_salt else {})
        metadata = [] if extension is None else [(EXTENSION_KEY, extension)]

        async def addressed(lease: Lease) -> tuple[engine_pb.GenerateRequest, Metadata]:
            return request, metadata

        handed = await self._picker.splitter.prefill(info, request, addressed, seconds)
        return (info, None) if handed is None else (handed.info, handed.params)

    async def _report(
        self, request: pb.ReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReportResponse:
        await self._tenant(context)
        if request.event == _Event.STARTED:
            known = self._away.started(request.route_id)
        elif request.event == _Event.ENDED:
            code = _BY_NUMBER.get(request.grpc_code, _Code.UNKNOWN)
            # A client's word costs an engine a health check, not its place: clients may err or lie.
            engine = _Code.INTERNAL if code is _Code.UNAVAILABLE else code
            known = self._away.ended(request.route_id, code, engine=engine)
        else:
            await context.abort(_Code.INVALID_ARGUMENT, "event must be STARTED or ENDED")
        if not known:
            message = "no such route here: it has ended, has expired or was made by another router"
            await context.abort(_Code.NOT_FOUND, message)
        return pb.ReportResponse()

    async def _tenant(self, context: grpc.aio.ServicerContext) -> Tenant:
        tenant = self._keys.tenant_of(_pairs(context))
        if tenant is None:
            await context.abort(_Code.UNAUTHENTICATED, NO_KEY)
        assert tenant is not None
        return tenant


def info_of(request: pb.RouteRequest, tenant: Tenant) -> RequestInfo:
    """What the picker needs of ``request``; ValueError for what it got wrong."""
    if not 0 <= request.timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds must not be negative, got {request.timeout_seconds}")
    generate = engine_pb.GenerateRequest(request_id=request.request_id)
    generate.tokenized.input_ids.extend(request.token_ids)
    fields = {"cache_salt": request.cache_salt} if request.cache_salt else {}
    extension = encode(fields)
    metadata = [] if extension is None else [(EXTENSION_KEY, extension)]
    head = read_head("Generate", generate.SerializeToString(), metadata)
    return RequestInfo(
        model=request.model,
        prompt_tokens=head.prompt_tokens or request.prompt_tokens,
        request_id=request.request_id,
        session=request.session,
        cache_salt=request.cache_salt,
        priority=request.priority,
        excluded=frozenset(request.excluded),
        prompt=head.prompt if request.token_ids else None,
        tenant=tenant,
    )


def _pairs(context: grpc.aio.ServicerContext) -> Sequence[tuple[str, str | bytes]]:
    return tuple(context.invocation_metadata() or ())
