"""The picker as Envoy asks it: HTTP/1.1 ``ext_authz``, one request per call.

The question is the call's own path, a few of its headers and its body; the answer is 200 with the engine in headers,
or the status that the client gets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import httptools

from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.envoy.config import CLUSTER, DESTINATION, LEASE, cluster_of
from npufleet.cluster.router.errors import NoEngine
from npufleet.cluster.router.metrics import UNKNOWN_MODEL, RouterMetrics
from npufleet.cluster.router.picker import Lease, Picker, RequestInfo
from npufleet.cluster.router.wire import MODEL_KEY, SESSION_KEY, read_head
from npufleet.cluster.transport.http2.headers import _binary

_log = logging.getLogger(__name__)
_Code = grpc.StatusCode
_HTTP = {
    _Code.INVALID_ARGUMENT: 400,
    _Code.UNAUTHENTICATED: 401,
    _Code.NOT_FOUND: 404,
    _Code.RESOURCE_EXHAUSTED: 429,
}
Headers = Sequence[tuple[str, str]]


class EnvoyPicker:
    """Decides for Envoy, and keeps the leases of the calls that it carries."""

    def __init__(self, picker: Picker, metrics: RouterMetrics, keys: Keys) -> None:
        self.addresses: dict[str, str] = {}  # engine id -> the IP address and port that Envoy knows it by
        self._picker = picker
        self._metrics = metrics
        self._keys = keys
        self._numbers = itertools.count(1)
        self._leases: dict[int, tuple[Lease, str]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def running(self) -> int:
        """Calls that Envoy carries now."""
        return len(self._leases)

    async def start(self) -> int:
        """Listen on loopback; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def on_connection(self, connection: _Connection, *, gone: bool) -> None:
        """A connection of Envoy's came or went."""
        (self._connections.discard if gone else self._connections.add)(connection)

    def close(self) -> None:
        """Answer no more; what Envoy carried counts as cancelled."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        self.forget_all()

    def forget_all(self) -> None:
        """Envoy is gone, and its calls with it."""
        for number in list(self._leases):
            self.ended(number, _Code.CANCELLED)

    def ended(self, number: int, code: grpc.StatusCode) -> None:
        """Envoy's call ``number`` ended with ``code``."""
        found = self._leases.pop(number, None)
        if found is not None:
            lease, method = found
            model = lease.endpoint.model
            self._metrics.of(model).in_flight.dec()
            self._metrics.ended(model, method, code)
            lease.release(code)

    async def decide(self, path: str, headers: Headers, body: bytes) -> tuple[int, Headers, str]:
        """HTTP status, headers and text of the answer."""
        method = path.rpartition("/")[2]
        tenant = self._keys.tenant_of(headers)
        if tenant is None:
            return self._refuse(
                method, _Code.UNAUTHENTICATED, "a valid API key is needed: authorization: Bearer KEY"
            )
        known = dict(headers)
        raw = b"" if body[:1] == b"\1" else body[5:]  # a compressed message is not read, only carried
        try:
            metadata = [(k, _binary(v) if k.endswith("-bin") else v) for k, v in headers]
            head = read_head(method, raw, metadata)
            info = RequestInfo(
                model=known.get(MODEL_KEY, ""),
                prompt_tokens=head.prompt_tokens,
                request_id=head.request_id,
                session=known.get(SESSION_KEY, "") or head.session,
                cache_salt=head.cache_salt,
                priority=head.priority,
                prompt=head.prompt,
                tenant=tenant,
            )
            lease = await self._picker.pick(info)
        except ValueError as error:
            return self._refuse(method, _Code.INVALID_ARGUMENT, str(error))
        except NoEngine as error:
            return self._refuse(method, error.code, str(error), error.retry_after)
        address = self.addresses.get(lease.endpoint.engine_id)
        if address is None:
            lease.release(_Code.CANCELLED)
            return self._refuse(
                method, _Code.UNAVAILABLE, "the engine is not known to the data plane yet", 1.0
            )
        number = next(self._numbers)
        self._leases[number] = (lease, method)
        model = lease.endpoint.model
        self._metrics.of(model).in_flight.inc()
        return 200, ((DESTINATION, address), (CLUSTER, cluster_of(model)), (LEASE, str(number))), ""

    def _refuse(
        self, method: str, code: grpc.StatusCode, text: str, retry_after: float | None = None
    ) -> tuple[int, Headers, str]:
        self._metrics.ended(UNKNOWN_MODEL, method if method in ("Generate", "Embed") else "other", code)
        headers = [("grpc-status", str(code.value[0]))]
        if retry_after is not None:
            headers += [
                ("retry-after", f"{retry_after:g}"),
                ("grpc-retry-pushback-ms", str(int(retry_after * 1000))),
            ]
        return _HTTP.get(code, 503), headers, text


class _Connection(asyncio.Protocol):
    """One keep-alive connection of Envoy's, with one request at a time."""

    def __init__(self, picker: EnvoyPicker) -> None:
        self._picker = picker
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._parser: Any = None
        self._reset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._picker.on_connection(self, gone=False)

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._picker.on_connection(self, gone=True)
        if self._task is not None:  # its client has gone: it must not wait for an engine any longer
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            _log.warning("a question that is not HTTP: %s", error)
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        question = (self._path, self._headers, b"".join(self._body))
        self._reset()
        self._task = asyncio.ensure_future(self._answer(*question))

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._headers, self._body = "", list[tuple[str, str]](), list[bytes]()

    async def _answer(self, path: str, headers: Headers, body: bytes) -> None:
        try:
            status, answer, text = await self._picker.decide(path, headers, body)
        except Exception:  # noqa: BLE001 - supervisor: one question's fault must not leave Envoy waiting
            _log.exception("the picker failed")
            status, answer, text = 503, (), "the picker failed"
        finally:
            self._task = None
        content = text.encode()
        lines = [f"HTTP/1.1 {status} -", f"content-length: {len(content)}", *(f"{k}: {v}" for k, v in answer)]
        if not self._transport.is_closing():
            self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
        elif status == 200:  # nobody to carry it any more
            self._picker.ended(int(dict(answer)[LEASE]), _Code.CANCELLED)
