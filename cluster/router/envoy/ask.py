"""What Envoy asks: from headers and body of a gRPC request to a placed request or to the client's answer.

The HTTP filter and the Endpoint Picker share this, so both decide alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc

from npufleet.cluster.addresses import netloc
from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.proto.extension import EXTENSION_KEY
from npufleet.cluster.router.away import Away, AwayRequests
from npufleet.cluster.router.call import NO_KEY, CallError
from npufleet.cluster.router.envoy.binary import from_base64
from npufleet.cluster.router.envoy.engines import EngineAddresses
from npufleet.cluster.router.envoy.settings import (
    DESTINATION_KEY,
    FRAME,
    PEER_KEY,
    PICK_KEY,
    RANK_KEY,
    RETRIES_KEY,
    TOKEN_KEY,
)
from npufleet.cluster.router.errors import NoEngine
from npufleet.cluster.router.lookaside.tokens import TokenMint
from npufleet.cluster.router.metrics import UNKNOWN_MODEL, RouterMetrics
from npufleet.cluster.router.picker import RequestInfo
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.router.wire import MODEL_KEY, SERVICE, SESSION_KEY, read_head

_Code = grpc.StatusCode
_PREFIX = f"/{SERVICE}/"
VIA = "envoy"
_MARGIN = 0.05  # seconds that an engine has more than its client
_LONGEST = 86400.0  # seconds; fits the eight digits of a grpc-timeout in milliseconds
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where a request goes: the headers that tell Envoy so."""

    headers: tuple[tuple[str, str], ...]
    away: Away


class Asked:
    """Answers for one router."""

    def __init__(
        self,
        away: AwayRequests,
        engines: EngineAddresses,
        metrics: RouterMetrics,
        settings: RouterSettings,
        keys: Keys,
    ) -> None:
        self.away = away
        self.engines = engines
        self._metrics = metrics
        self._mint = None if settings.secret is None else TokenMint(settings.secret)
        self._max_bytes = settings.max_request_bytes
        self._keys = keys

    async def place(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        excluded: frozenset[str] = frozenset(),
    ) -> Placed:
        """Place the request; ``body`` None: it is not known. Raises :class:`CallError` with what its client
        shall be told.
        """
        method = path.removeprefix(_PREFIX)
        if path == method or method not in ("Generate", "Embed"):
            raise CallError(_Code.UNIMPLEMENTED, f"no engine is picked for {path[:200]}")
        tenant = self._keys.tenant_of(tuple(headers.items()))
        if tenant is None:
            self._metrics.ended(UNKNOWN_MODEL, method, _Code.UNAUTHENTICATED)
            raise CallError(_Code.UNAUTHENTICATED, NO_KEY)
        if (
            body is not None and int.from_bytes(body[1:FRAME], "big") > self._max_bytes
        ):  # Envoy may cut it off there
            self._metrics.ended(UNKNOWN_MODEL, method, _Code.RESOURCE_EXHAUSTED)
            raise CallError(_Code.RESOURCE_EXHAUSTED, f"the request is longer than {self._max_bytes} bytes")
        try:
            info = replace(self._info(method, headers, body), excluded=excluded, tenant=tenant)
        except ValueError as error:
            self._metrics.ended(UNKNOWN_MODEL, method, _Code.INVALID_ARGUMENT)
            raise CallError(_Code.INVALID_ARGUMENT, str(error)) from error
        timeout = read_timeout(headers.get("grpc-timeout", ""))
        try:
            away = await self.away.place(
                method, info, via=VIA, peer=headers.get(PEER_KEY, ""), deadline=timeout
            )
        except NoEngine as error:
            raise CallError.from_no_engine(error) from error
        placed = self._headers(away)
        if timeout is not None:  # the client's own clock shall end the call, not the engine's reset
            placed = (*placed, ("grpc-timeout", f"{int((timeout + _MARGIN) * 1000)}m"))
        return Placed(headers=placed, away=away)

    def _info(self, method: str, headers: Mapping[str, str], body: bytes | None) -> RequestInfo:
        if body is None:
            return RequestInfo(model=headers.get(MODEL_KEY, ""), session=headers.get(SESSION_KEY, ""))
        raw = read_message(body, headers.get("grpc-encoding", "identity"), self._max_bytes)
        extension = headers.get(EXTENSION_KEY)
        metadata = [] if extension is None else [(EXTENSION_KEY, from_base64(extension))]
        head = read_head(method, raw, metadata)
        return RequestInfo(
            model=headers.get(MODEL_KEY, ""),
            prompt_tokens=head.prompt_tokens,
            request_id=head.request_id,
            session=headers.get(SESSION_KEY, "") or head.session,
            cache_salt=head.cache_salt,
            priority=head.priority,
            prompt=head.prompt,
        )

    def _headers(self, away: Away) -> tuple[tuple[str, str], ...]:
        endpoints = (away.lease.endpoint, *away.others)
        known = [self.engines.get(endpoint.engine_id) for endpoint in endpoints]
        hosts = ",".join(netloc(*address) for address in known if address is not None)
        if not hosts:
            self.away.ended(away.id, _Code.UNAVAILABLE, engine=_Code.CANCELLED)
            raise CallError(_Code.UNAVAILABLE, f"engine {endpoints[0].engine_id!r} has no address yet")
        # With nobody left to ask, the status of the last engine shall stand.
        retries = str(hosts.count(","))
        headers = [(DESTINATION_KEY, hosts), (PICK_KEY, away.id), (RETRIES_KEY, retries)]
        if away.lease.rank is not None:
            headers.append((RANK_KEY, str(away.lease.rank)))
        if self._mint is not None:
            headers.append((TOKEN_KEY, self._mint.fleet()))
        return tuple(headers)


def read_message(body: bytes, encoding: str, most: int) -> bytes:
    """The one message of a unary gRPC request; ValueError where there is none or more than ``most`` bytes."""
    length = int.from_bytes(body[1:FRAME], "big")
    if len(body) != FRAME + length:
        raise ValueError(f"the request is not one gRPC message: {len(body)} bytes for a message of {length}")
    raw = body[FRAME:]
    if not body[0]:
        return raw
    if encoding not in ("gzip", "deflate"):
        raise ValueError(f"the request is compressed with {encoding[:40]!r}; gzip and deflate are understood")
    unpacker = zlib.decompressobj(wbits=31 if encoding == "gzip" else 15)
    try:
        raw = unpacker.decompress(raw, most)
    except zlib.error as error:
        raise ValueError(f"the request is not {encoding}: {error}") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"the request is incomplete or longer than {most} bytes")
    return raw


def read_timeout(value: str) -> float | None:
    """The seconds of a ``grpc-timeout`` header, None where it says nothing (gRPC over HTTP/2, "Timeout")."""
    digits, unit = value[:-1], value[-1:]
    if unit not in _UNITS or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return min(int(digits) * _UNITS[unit], _LONGEST)
