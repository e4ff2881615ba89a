"""The ASGI application of a gateway: several models behind one port.

/health, /metrics and /v1/models are answered here. Every other request goes to the frontend of the model that
its JSON body names; a gateway with one model takes requests that name none.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from traceback import format_exc
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..access import AccessLog, request_id
from ..admission.tenants import ANYONE, Keys
from ..tracing import CONTEXT_KEYS, Tracing
from .errors import DEADLINE, RETRY_AFTER, TENANT, TRACE
from .http import (
    ClientGone,
    HttpError,
    Message,
    Receive,
    Scope,
    Send,
    header,
    model_in,
    read_body,
    replay,
    respond,
    tenant_of,
)
from .metrics import GatewayMetrics
from .outlet import OUTLET, outlet_under
from .settings import GatewaySettings
from .slots import Slot

logger = logging.getLogger(__name__)

_OPEN = frozenset({"/health", "/metrics", "/ping"})  # answered without an API key
_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_COME_BACK = frozenset({HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS})
_NAMED = (
    _OPEN | _GENERATING | {"/v1/models", "/version", "/tokenize", "/detokenize", "/v1/messages/count_tokens"}
)


class Dispatcher:
    """ASGI callable over ``slots`` (model name -> slot), which may change while it runs."""

    def __init__(self, slots: Mapping[str, Slot], settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._slots = slots
        self._settings = settings
        self._metrics = metrics
        self._keys = Keys(settings.api_keys)
        self._access = AccessLog(settings.access_log)
        self._tracing = Tracing("npufleet-gateway", settings.otlp_endpoint)
        self.turned_away: Counter[str] = Counter()  # requests that found no engine, by model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not offered by this gateway"})
            return
        assert scope["type"] == "http", scope["type"]
        begun = time.perf_counter()
        name = _named_request(scope)
        answer = _Answer(send, self._settings.retry_after, name)
        RETRY_AFTER.set(answer.note)
        OUTLET.set(answer.outlet)
        TENANT.set(ANYONE)
        span = self._tracing.span(f"npufleet.gateway {scope['method']}", _context_of(scope))
        TRACE.set(span.context())
        model = ""
        self._metrics.http_open.inc()
        try:
            model = await self._answer(scope, receive, answer.send)
        except ClientGone:
            answer.status = answer.status or 499
        except HttpError as error:
            await respond(answer.send, error.status, error.body())
        except Exception as fault:  # noqa: BLE001 - supervisor: one request's fault is answered with a 500
            logger.error("request %s %s failed:\n%s", scope["method"], scope["path"], format_exc())
            if answer.status == 0:
                broken = HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, f"gateway fault: {type(fault).__name__}")
                await respond(answer.send, broken.status, broken.body())
        finally:
            self._metrics.http_open.dec()
            path = scope["path"] if scope["path"] in _NAMED else "other"
            status = answer.status or 499
            self._metrics.http.labels(model, path, str(status)).inc()
            span.end(status < 500, path=path, status=status, model=model, request_id=name)
            if self._access.enabled:
                self._access.write(
                    request_id=name,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    model=model,
                    tenant=TENANT.get().name,
                    peer=":".join(map(str, scope.get("client") or ())),
                    seconds=time.perf_counter() - begun,
                )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Answer one request; returns the model it went to, "" for none."""
        path, method = scope["path"], scope["method"]
        if path not in _OPEN:
            TENANT.set(tenant_of(self._keys, scope))
            DEADLINE.set(_deadline(scope))
        if method in ("GET", "HEAD"):
            if path == "/health":
                return await self._health(send)
            if path == "/metrics":
                await respond(send, 200, self.series(), CONTENT_TYPE_LATEST.encode())
                return ""
            if path == "/v1/models" or path.startswith("/v1/models/"):
                return await self._models(path, send)
        slot = None
        if method in ("POST", "PUT", "PATCH"):
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            receive = replay(body, receive)
            multipart = (header(scope, b"content-type") or b"").startswith(b"multipart/")
            slot = self._slot_for(None if multipart else model_in(body))
        else:
            slot = self._slot_for(None, any_will_do=True)
        if slot.frontend is None or (path in _GENERATING and not slot.engines):
            reason = slot.problem if slot.frontend is None else "none of its engines can take a request now"
            self.turned_away[slot.spec.name] += not slot.engines
            raise HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"model {slot.spec.name!r} is not ready: {reason}",
                kind="ServiceUnavailableError",
            )
        await slot.answer(scope, receive, send)
        return slot.spec.name

    def _slot_for(self, model: str | None, *, any_will_do: bool = False) -> Slot:
        if model is not None:
            slot = self._slots.get(model)
            if slot is None:
                raise HttpError(
                    HTTPStatus.NOT_FOUND,
                    f"The model `{model[:200]}` does not exist.",
                    kind="NotFoundError",
                    param="model",
                )
            return slot
        if not self._slots:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "this gateway serves no model yet")
        if len(self._slots) > 1 and not any_will_do:
            names = ", ".join(sorted(self._slots))
            raise HttpError(
                HTTPStatus.BAD_REQUEST,
                f"the request must name its model, one of: {names}",
                kind="BadRequestError",
                param="model",
            )
        ready = [slot for slot in self._slots.values() if slot.frontend is not None]
        return ready[0] if ready else next(iter(self._slots.values()))

    def close(self) -> None:
        """Send the traces that are left."""
        self._tracing.close()

    def alive(self) -> bool:
        """True where at least one model can answer: its frontend is up and an engine can take a request."""
        return any(slot.frontend is not None and slot.engines > 0 for slot in self._slots.values())

    async def _health(self, send: Send) -> str:
        if not self.alive():
            detail = {name: slot.problem for name, slot in self._slots.items() if slot.frontend is None}
            message = f"no model has a live engine{f': {detail}' if detail else ''}"
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind="ServiceUnavailableError")
        await respond(send, 200, b"")
        return ""

    def series(self) -> bytes:
        """The process's series in the format of Prometheus."""
        for name, slot in self._slots.items():
            self._metrics.engines.labels(name).set(slot.engines)
            running = slot.frontend.core.active if slot.frontend is not None else 0
            self._metrics.running.labels(name).set(running)
        # The default registry holds the process's own series and those of vLLM's HTTP instrumentation.
        return generate_latest(self._metrics.registry) + generate_latest(REGISTRY)

    async def _models(self, path: str, send: Send) -> str:
        cards: list[dict[str, Any]] = []
        for slot in list(self._slots.values()):
            cards += await slot.cards()
        name = path.removeprefix("/v1/models").removeprefix("/")
        answer: Any = {"object": "list", "data": cards}
        if name:
            answer = next((card for card in cards if card["id"] == name), None)
            if answer is None:
                self._slot_for(name)
        await respond(send, 200, json.dumps(answer).encode())
        return ""


def _named_request(scope: Scope) -> str:
    """The request's id, its client's own where that will do; the frontend finds it in the headers."""
    given = (header(scope, b"x-request-id") or b"").decode("latin-1")
    name = request_id(given)
    if name != given:
        others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        scope["headers"] = [*others, (b"x-request-id", name.encode())]
    return name


def _deadline(scope: Scope) -> float | None:
    """Monotonic seconds at which ``X-Request-Timeout`` (seconds) is over; None without it. HttpError 400 otherwise."""
    given = header(scope, b"x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise HttpError(
            HTTPStatus.BAD_REQUEST,
            f"X-Request-Timeout must be seconds above 0, got {given[:50].decode('latin-1')!r}",
            kind="BadRequestError",
            param="X-Request-Timeout",
        )
    return time.monotonic() + seconds


def _context_of(scope: Scope) -> list[tuple[str, str]]:
    """The headers that tell which trace a request belongs to."""
    given = ((key, header(scope, key.encode())) for key in CONTEXT_KEYS)
    return [(key, value.decode("latin-1")) for key, value in given if value is not None]


class _Answer:
    """Watches one answer go out: keeps its status, names the request, tells when to come back with 503 and 429."""

    def __init__(self, send: Send, retry_after: float, request_id: str) -> None:
        self.status = 0
        self._request_id = request_id.encode()
        self.note = {"seconds": retry_after}
        self.outlet = outlet_under(send)
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
            headers = [*kept, (b"x-request-id", self._request_id)]
            if self.status in _COME_BACK:
                headers.append((b"retry-after", str(max(1, math.ceil(self.note["seconds"]))).encode()))
            message["headers"] = headers
        elif self.outlet is not None:
            self.outlet.bodies += 1
        await self._send(message)
