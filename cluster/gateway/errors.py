"""What a client is told when an engine could not answer.

vLLM's frontend passes ``VLLMClientError`` and ``GracefulHTTPError`` through to the client with their own text
and status; in a stream that has begun they become an SSE error event. Texts name no engine and no address:
those are in the log.
"""

from __future__ import annotations

from contextvars import ContextVar
from http import HTTPStatus

import grpc
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMNotFoundError, VLLMValidationError

from ..admission.tenants import ANYONE, Tenant
from ..router.errors import NoEngine, NoEngineReason

Code = grpc.StatusCode

RETRY_AFTER: ContextVar[dict[str, float] | None] = ContextVar("npufleet_retry_after", default=None)
"""A note that the HTTP layer lays down per request and reads when it answers 503: ``{"seconds": n}``."""

TENANT: ContextVar[Tenant] = ContextVar("npufleet_tenant", default=ANYONE)
"""Whose request it is: the HTTP layer sets it from the API key."""

DEADLINE: ContextVar[float | None] = ContextVar("npufleet_deadline", default=None)
"""Monotonic seconds at which the client stops waiting; None where it did not say."""

TRACE: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("npufleet_trace", default=())
"""The trace context that what comes after the gateway belongs to."""

_BAD_REQUEST = frozenset({Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.FAILED_PRECONDITION})


def client_error(error: grpc.aio.AioRpcError, tokens_sent: int, why: str = "") -> VLLMError:
    """The error for a call that failed for good; ``tokens_sent``: tokens that the client already has, ``why``: why no
    other engine goes on with them."""
    code, detail = error.code(), error.details() or ""
    if code in _BAD_REQUEST:
        return VLLMValidationError(detail)
    if code is Code.NOT_FOUND:
        return VLLMNotFoundError(detail)
    if code is Code.UNIMPLEMENTED:
        return GracefulHTTPError(f"the engine does not offer this: {detail}", HTTPStatus.NOT_IMPLEMENTED)
    if code is Code.DEADLINE_EXCEEDED:
        return too_late(tokens_sent)
    if tokens_sent:
        return GracefulHTTPError(
            f"the engine was lost after {tokens_sent} tokens of this answer ({code.name}){because(why)}; "
            "send the request again",
            HTTPStatus.BAD_GATEWAY,
        )
    if code is Code.RESOURCE_EXHAUSTED:
        return GracefulHTTPError(
            "every engine is full; send the request again later", HTTPStatus.SERVICE_UNAVAILABLE
        )
    if code is Code.UNAVAILABLE:
        return GracefulHTTPError("no engine could be reached", HTTPStatus.SERVICE_UNAVAILABLE)
    return GracefulHTTPError(
        f"the engine failed while it had this request ({code.name}); send the request again",
        HTTPStatus.BAD_GATEWAY,
    )


def too_late(tokens_sent: int) -> VLLMError:
    """The error for a request whose time is over."""
    after = f"; it had {tokens_sent} tokens" if tokens_sent else ""
    return GracefulHTTPError(f"the answer was not whole in time{after}", HTTPStatus.GATEWAY_TIMEOUT)


def because(why: str) -> str:
    """What a text about a lost engine adds where nobody went on with the answer."""
    return f" and no other went on, because {why}" if why else ""


def stalled(seconds: float, tokens_sent: int, why: str = "") -> VLLMError:
    """The error for an engine that went silent for ``seconds``; ``why`` as for :func:`client_error`."""
    return GracefulHTTPError(
        f"the engine went silent for {seconds:.0f} s after {tokens_sent} tokens{because(why)}; send the request again",
        HTTPStatus.GATEWAY_TIMEOUT,
    )


def removed(model: str) -> VLLMError:
    """The error for a request of a model that the gateway stops serving, or serves with other settings now."""
    return GracefulHTTPError(
        f"model {model!r} was removed or changed while it had this request; send the request again",
        HTTPStatus.SERVICE_UNAVAILABLE,
    )


def no_engine(error: NoEngine) -> VLLMError:
    """The error for a request that no engine can take."""
    if error.reason in (NoEngineReason.UNKNOWN_MODEL, NoEngineReason.MODEL_REQUIRED):
        return VLLMNotFoundError(str(error))
    note = RETRY_AFTER.get()
    if note is not None and error.retry_after:
        note["seconds"] = error.retry_after
    limited = error.reason is NoEngineReason.RATE_LIMITED
    status = HTTPStatus.TOO_MANY_REQUESTS if limited else HTTPStatus.SERVICE_UNAVAILABLE
    return GracefulHTTPError(str(error), status)
