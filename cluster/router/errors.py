"""Failures that the router reports, and what an engine's gRPC status says about the engine.

A status that the client caused (a bad argument, a cancelled stream, an expired deadline) says nothing about
the engine: it is never retried and never counted against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import grpc

Code = grpc.StatusCode

# The transport broke or the engine refuses work: it is out of the rotation until a probe succeeds.
LOST = frozenset({Code.UNAVAILABLE})
# The engine failed while it had the request: another engine may succeed, but the request itself may be what
# broke it, so one more engine is tried and no more.
BROKE = frozenset({Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS})
# The engine is well but full: another may have room.
FULL = frozenset({Code.RESOURCE_EXHAUSTED})
# Ways in which the stream of an answer breaks because of its engine, or of the way to it.
LOSSES = LOST | BROKE | {Code.ABORTED}


class NoEngineReason(StrEnum):
    """Why no engine could be picked."""

    UNKNOWN_MODEL = "unknown_model"  # no model deployment of that name; asking again does not help
    MODEL_REQUIRED = "model_required"  # several model deployments and the request names none
    NOT_READY = "not_ready"  # the model is known, none of its engines can take a request now
    EXCLUDED = "excluded"  # engines are ready, but each already failed this request
    OVERLOADED = "overloaded"  # it would have to wait for longer than it may
    RATE_LIMITED = "rate_limited"  # its tenant has used its tokens


class NoEngine(Exception):
    """No engine can take the request.

    ``retry_after`` is seconds after which asking again may help, or None where it cannot.
    """

    def __init__(
        self,
        reason: NoEngineReason,
        message: str,
        *,
        models: Sequence[str] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.models = tuple(models)
        self.retry_after = retry_after

    @property
    def refused(self) -> bool:
        """Admission turned the request away."""
        return self.reason in (NoEngineReason.OVERLOADED, NoEngineReason.RATE_LIMITED)

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status that tells a client the same."""
        return _NO_ENGINE_CODES[self.reason]


_NO_ENGINE_CODES = {
    NoEngineReason.UNKNOWN_MODEL: Code.NOT_FOUND,
    NoEngineReason.MODEL_REQUIRED: Code.INVALID_ARGUMENT,
    NoEngineReason.NOT_READY: Code.UNAVAILABLE,
    NoEngineReason.EXCLUDED: Code.UNAVAILABLE,
    NoEngineReason.OVERLOADED: Code.RESOURCE_EXHAUSTED,
    NoEngineReason.RATE_LIMITED: Code.RESOURCE_EXHAUSTED,
}


def attempts_for(code: grpc.StatusCode, most: int) -> int:
    """How many engines in all a request may try when one fails with ``code`` before any output.

    ``most`` is the configured limit. 1 means: do not retry.
    """
    if code in LOST or code in FULL:
        return most
    return min(2, most) if code in LOSSES else 1
