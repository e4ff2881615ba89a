"""Have a prompt computed on one engine so that another one can go on with the answer.

Whatever goes wrong meanwhile costs time, never the answer: the request then goes to one engine as a whole.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.base import RequestInfo
from npufleet.cluster.router.split.base import Params, Stage
from npufleet.cluster.router.split.registry import handoff_of
from npufleet.cluster.router.split.requests import (
    may_split,
    prefill_metadata,
    prefill_request,
    worth_splitting,
)
from npufleet.cluster.router.wire import path, pb, with_rank
from npufleet.cluster.transport.closed import closed_is_unavailable

if TYPE_CHECKING:
    from npufleet.cluster.router.picker import Lease, Picker

_log = logging.getLogger(__name__)
Metadata = Iterable[tuple[str, str | bytes]]
Addressed = Callable[["Lease"], Awaitable[tuple[pb.GenerateRequest, Metadata]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """A prompt that has been computed: what the decoding engine is to be told, and the request as it is now."""

    params: Params | None
    info: RequestInfo


class Splitter:
    """Splits the requests of one picker. ``on_split(model, outcome)`` counts them."""

    def __init__(self, picker: Picker, least: int, on_split: Callable[[str, str], None]) -> None:
        """``least``: uncached prompt tokens from which on a prompt is computed apart."""
        self._picker = picker
        self._least = least
        self._on_split = on_split

    async def prefill(
        self, info: RequestInfo, request: pb.GenerateRequest, addressed: Addressed, seconds: float
    ) -> Handed | None:
        """Compute the prompt of ``request`` apart; None where nothing was done and it goes to one engine as a whole.

        ``addressed(lease)`` is the request and its metadata as the leased engine understands them. Raises
        :class:`NoEngine` where admission refuses it, ``AioRpcError`` for what the client got wrong, and what
        ``addressed`` raises.
        """
        if not self._picker.pool.splits(info.model) or not self._wanted(info, request):
            return None
        lease = await self._picker.pick(replace(info, stage=Stage.PREFILL))
        handoff, transfer = handoff_of(lease.endpoint.kv_connector), f"npufleet-{uuid.uuid4().hex}"
        code, params = grpc.StatusCode.CANCELLED, None
        try:
            if handoff is None:
                raise ValueError(f"no way is known to hand prompts over by {lease.endpoint.kv_connector!r}")
            first, metadata = await addressed(lease)
            raw = with_rank(prefill_request(first, handoff.prefill(transfer)), lease.rank)
            told = await _compute(lease, raw, prefill_metadata(metadata), seconds)
            code = grpc.StatusCode.OK
            params = handoff.decode(transfer, told, lease.endpoint, lease.rank)
        except ValueError as error:
            code = grpc.StatusCode.OK if code is grpc.StatusCode.OK else grpc.StatusCode.INTERNAL
            return self._failed(info, lease.endpoint, str(error))
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return self._failed(info, lease.endpoint, f"{code.name}: {error.details()}")
        finally:
            lease.release(code)
        self._on_split(info.model, "split")
        return Handed(params=params, info=_to_decode(info))

    def _wanted(self, info: RequestInfo, request: pb.GenerateRequest) -> bool:
        if not may_split(request):
            return False
        loads = self._picker.look(info.model, replace(info, stage=Stage.DECODE))
        if not loads:
            return False  # nobody would go on with it
        if not self._picker.pool.fit(info.model, Stage.PREFILL):
            self._on_split(info.model, "no_prefill_engine")
            return False
        cached = max(load.cached_tokens for load in loads)
        if worth_splitting(info.prompt_tokens, cached, self._least):
            return True
        self._on_split(info.model, "short")
        return False

    def _failed(self, info: RequestInfo, endpoint: EngineEndpoint, why: str) -> Handed:
        _log.warning("engine %s did not compute a prompt for others: %s", endpoint.engine_id, why)
        self._on_split(info.model, "failed")
        return Handed(params=None, info=replace(info, admitted=True))


async def _compute(lease: Lease, raw: bytes, metadata: Metadata, seconds: float) -> Params | None:
    """Run the first request to its end; the parameters of its answer. Raises as :func:`_params_in` does."""
    call: Any = lease.channel.unary_stream(path("Generate"))(raw, timeout=seconds, metadata=tuple(metadata))
    told = None
    try:
        with closed_is_unavailable():
            while (message := await call.read()) is not grpc.aio.EOF:
                lease.heard()
                lease.started()
                told = _params_in(message) or told
    finally:
        call.cancel()
    return told


def _params_in(message: bytes) -> Params | None:
    """The parameters of a transfer in an engine's message; ValueError where it cannot be read or they are none."""
    try:
        text = pb.GenerateResponse.FromString(message).complete.kv_transfer_params_json
        params = json.loads(text) if text else None
    except (DecodeError, RecursionError) as error:
        raise ValueError(f"its answer cannot be read: {error}") from error
    if not isinstance(params, dict | None):
        raise ValueError(f"its parameters of the transfer are not a JSON object: {text[:200]}")
    return params


def _to_decode(info: RequestInfo) -> RequestInfo:
    """The request for an engine that computes nothing of its prompt: its load decides, not its cache."""
    return replace(info, stage=Stage.DECODE, admitted=True, prompt=None, prompt_tokens=1)
