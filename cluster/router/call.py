"""One call at the front: what its metadata says, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import grpc

from npufleet.cluster.access import AccessLog
from npufleet.cluster.admission.tenants import ANYONE, Keys, Tenant
from npufleet.cluster.proto.extension import RANK_KEY
from npufleet.cluster.router.errors import NoEngine
from npufleet.cluster.router.metrics import UNKNOWN_MODEL, RouterMetrics, outcome_of
from npufleet.cluster.router.wire import (
    ENGINE_KEY,
    MODEL_KEY,
    PEER_KEY,
    SESSION_KEY,
    NotAMessage,
    check_message,
)
from npufleet.cluster.tracing import CONTEXT_KEYS, Span, Tracing

Metadata = Sequence[tuple[str, str | bytes]]

NO_KEY = "a valid API key is needed: metadata authorization: Bearer KEY"

_log = logging.getLogger(__name__)
_OF_THIS_HOP = frozenset(  # a connection's own, not the request's; and keys are for the router's eyes only
    {"user-agent", "te", "content-type", "authorization", "x-api-key", RANK_KEY, *CONTEXT_KEYS}
)
_FOR_ADMINS = frozenset({"FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"})
_TRACES = frozenset({"grpc-trace-bin", "grpc-tags-bin"})  # of the grpc-* keys, the request's own


class CallError(Exception):
    """The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = tuple(trailing)

    @classmethod
    def from_no_engine(cls, error: NoEngine) -> CallError:
        """With ``retry-after`` (s) and gRPC's ``grpc-retry-pushback-ms`` where asking again may help."""
        trailing: list[tuple[str, str | bytes]] = []
        if error.retry_after is not None:
            trailing = [
                ("retry-after", f"{error.retry_after:g}"),
                ("grpc-retry-pushback-ms", str(int(error.retry_after * 1000))),
            ]
        return cls(error.code, str(error), trailing)

    @classmethod
    def from_engine(cls, error: grpc.aio.AioRpcError, engine_id: str, prefix: str = "") -> CallError:
        """An engine's own status, passed on; ``prefix`` tells what the router knows beyond it."""
        details = error.details() or error.code().name
        trailing = [*(error.trailing_metadata() or ()), (ENGINE_KEY, engine_id)]
        return cls(error.code(), f"{prefix}{details}", trailing)


class Call:
    """A view of a servicer context."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.context = context
        self.metadata: Metadata = tuple(context.invocation_metadata() or ())
        self.model_label = UNKNOWN_MODEL  # becomes the model's name once it is known to exist
        self.tenant = ANYONE
        self.arrived = time.perf_counter()
        self.seen: dict[str, str | int | float] = {}  # what the access log and the trace tell of it
        self.span = Span(self.metadata)

    @property
    def peer(self) -> str:
        """The client's connection, as gRPC names it, or as Envoy does, which alone reaches a Unix socket."""
        peer: str = self.context.peer()
        return (self._text(PEER_KEY) or peer) if peer.startswith("unix:") else peer

    @property
    def model(self) -> str:
        """The model asked for, or ""."""
        return self._text(MODEL_KEY)

    @property
    def session(self) -> str:
        """The session that the request belongs to, or ""."""
        return self._text(SESSION_KEY)

    @property
    def engine_id(self) -> str:
        """The engine asked for (control calls only), or ""."""
        return self._text(ENGINE_KEY)

    def forwarded(self) -> Metadata:
        """The metadata that goes on to the engine, with the trace's context as it is behind this router."""
        own = (
            (key, value)
            for key, value in self.metadata
            if key not in _OF_THIS_HOP and (key in _TRACES or not key.startswith("grpc-"))
        )
        return [*own, *self.span.context()]

    def remaining(self, default: float) -> float:
        """Seconds that the client still waits, at most ``default`` where it set no deadline."""
        left = self.context.time_remaining()
        return default if left is None else max(0.0, left)

    def _text(self, key: str) -> str:
        for name, value in self.metadata:
            if name == key:
                return value if isinstance(value, str) else value.decode(errors="replace")
        return ""


Body = Callable[[bytes, Call], Awaitable[bytes | None]]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What every handler of one front needs."""

    metrics: RouterMetrics
    keys: Keys
    access: AccessLog
    tracing: Tracing


def handler(method: str, body: Body, around: Surroundings) -> Callable[..., Awaitable[bytes | None]]:
    """A grpc.aio handler around ``body``: checks the key, ends the call with the right status, counts and tells it."""

    async def handle(raw: bytes, context: grpc.aio.ServicerContext) -> bytes | None:
        call = Call(context)
        code = grpc.StatusCode.UNKNOWN  # what grpc.aio answers if something unforeseen leaves this function
        if around.tracing.records:
            call.span = around.tracing.span(f"npufleet.router/{method}", call.metadata)
        try:
            call.tenant = _tenant(method, call, around.keys)
            check_message(method, raw)
            result = await body(raw, call)
            code = grpc.StatusCode.OK
            return result
        except NoEngine as error:
            code = error.code
            await _end(context, CallError.from_no_engine(error))
        except CallError as error:
            code = error.code
            await _end(context, error)
        except NotAMessage as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            await _end(context, CallError(code, str(error)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Not this call but the one to the engine was cancelled, by us; the client still waits.
                code = grpc.StatusCode.UNAVAILABLE
                await _end(context, CallError(code, "the router closed its link to the engine"))
            left = context.time_remaining()
            late = left is not None and left <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        finally:
            around.metrics.ended(call.model_label, method, code)
            _tell(method, call, code, around)

    return handle


def _tell(method: str, call: Call, code: grpc.StatusCode, around: Surroundings) -> None:
    """End the trace's span and write the access log."""
    if around.tracing.records:
        ok = outcome_of(code) != "error"
        call.span.end(ok, method=method, code=code.name, model=call.model_label, **call.seen)
    if around.access.enabled:
        around.access.write(
            method=method,
            code=code.name,
            model=call.model_label,
            tenant=call.tenant.name,
            peer=call.peer,
            seconds=time.perf_counter() - call.arrived,
            **call.seen,
        )


def _tenant(method: str, call: Call, keys: Keys) -> Tenant:
    tenant = keys.tenant_of(call.metadata)
    if tenant is None:
        raise CallError(grpc.StatusCode.UNAUTHENTICATED, NO_KEY)
    if method in _FOR_ADMINS and not tenant.admin:
        raise CallError(grpc.StatusCode.PERMISSION_DENIED, f"{method} is for the keys of administrators")
    return tenant


async def _end(context: grpc.aio.ServicerContext, error: CallError) -> NoReturn:
    # A client's own mistakes are its to read; logging each would let it fill the log.
    level = logging.INFO if outcome_of(error.code) == "error" else logging.DEBUG
    _log.log(level, "call ends with %s: %s", error.code.name, error.details)
    await context.abort(error.code, error.details, tuple(error.trailing))
    raise AssertionError("abort() raises")
