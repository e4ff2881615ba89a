"""Who may call an engine of a fleet with a secret: whoever has a token that the fleet's router signed.

The router's own token opens every call. A token of one route opens one Generate or Embed, once, and Abort. What
only describes the engine, its health and reflection are open.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..router.lookaside.tokens import TOKEN_KEY, TokenError, check_token
from .service_rpc import SERVICE_NAME

_Code = grpc.StatusCode
_PREFIX = f"/{SERVICE_NAME}/"
_OPEN = frozenset({"GetModelInfo", "GetServerInfo", "HealthCheck"})
_ONCE = frozenset({"Generate", "Embed"})
_ROUTED = _ONCE | {"Abort"}


class Guard(grpc.aio.ServerInterceptor):
    """Looks at the token of each call. ``clock`` is seconds since the epoch."""

    def __init__(self, secret: bytes, engine_id: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._engine_id = engine_id
        self._clock = clock
        self._used: dict[str, float] = {}  # routes whose call has begun -> when their token expires

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Let the call through, or answer it with UNAUTHENTICATED or PERMISSION_DENIED."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix(_PREFIX)
        if handler is None or method == handler_call_details.method or method in _OPEN:
            return handler
        token = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        try:
            self._check(method, token if isinstance(token, str) else "")
        except TokenError as error:
            code = _Code.PERMISSION_DENIED if error.foreign else _Code.UNAUTHENTICATED
            return _refusal(handler, code, str(error))
        return handler

    def _check(self, method: str, token: str) -> None:
        claims = check_token(token, self._secret, self._engine_id)
        if claims.route is None:
            return
        if method not in _ROUTED:
            raise TokenError(f"the token of a route does not open {method}", foreign=True)
        if method not in _ONCE:
            return
        now = self._clock()
        if claims.route in self._used:
            raise TokenError("the token has been used; ask the router for a new one")
        while self._used and next(iter(self._used.values())) < now:  # about in the order of their ends
            self._used.pop(next(iter(self._used)))
        self._used[claims.route] = claims.expires


def _refusal(handler: grpc.RpcMethodHandler, code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, text)

    kind = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return kind(refuse, handler.request_deserializer, handler.response_serializer)
