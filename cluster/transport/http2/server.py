"""A gRPC server over our own HTTP/2: those parts of ``grpc.aio.Server`` that generated code and the router use.

A message that is written goes into the buffer of its connection and out with all others of the same turn of the event
loop, without a completion queue or a second thread. What faces clients by default is grpcio's server; this one is for
routers that stream many tokens and have no Envoy before them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from npufleet.cluster.transport.http2 import frames
from npufleet.cluster.transport.http2.requests import Request
from npufleet.cluster.transport.http2.served import ServedCall
from npufleet.cluster.transport.http2.serving import ServerConnection, ServerLimits

_log = logging.getLogger(__name__)
_Code = grpc.StatusCode
_BACKLOG = 1024


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    """What generated code asks to find a handler."""

    method: str
    invocation_metadata: Any = ()


class Http2Server:
    """A server of one event loop."""

    def __init__(self, limits: ServerLimits, *, reuse_port: bool = False) -> None:
        self._limits = limits
        self._reuse_port = reuse_port
        self._generic: list[grpc.GenericRpcHandler] = []
        self._handlers: dict[str, grpc.RpcMethodHandler | None] = {}  # by path, once asked for
        self._sockets: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._listening: list[asyncio.Server] = []
        self._connections: set[ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # as grpc.aio.Server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve what ``handlers`` know."""
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Nothing: generated code gives the same handlers to :meth:`add_generic_rpc_handlers`."""

    def add_insecure_port(self, address: str) -> int:
        """Take ``HOST:PORT`` or ``unix:PATH`` and return the port. RuntimeError where it cannot be had."""
        return self.add_port(address, None)

    def add_port(self, address: str, context: ssl.SSLContext | None) -> int:
        """As :meth:`add_insecure_port`, under TLS where there is a ``context``."""
        try:
            made = _bound(address, self._reuse_port)
        except OSError as error:
            raise RuntimeError(f"{address}: {error}") from error
        self._sockets.append((made, context))
        return 0 if made.family == socket.AF_UNIX else int(made.getsockname()[1])

    async def start(self) -> None:
        """Take connections."""
        loop = asyncio.get_running_loop()

        def connection() -> ServerConnection:
            return ServerConnection(self, self._limits, loop)

        for made, context in self._sockets:
            create = loop.create_unix_server if made.family == socket.AF_UNIX else loop.create_server
            # uvloop and asyncio agree on these arguments for both.
            server = await create(connection, sock=made, ssl=context, backlog=_BACKLOG)  # type: ignore[operator]
            self._listening.append(server)

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; after ``grace`` seconds cut off those that still run."""
        for server in self._listening:
            server.close()
        for made, _ in () if self._listening else self._sockets:
            made.close()
        for connection in tuple(self._connections):
            connection.drain()
        if self._tasks and grace:
            await asyncio.wait(tuple(self._tasks), timeout=grace)
        await asyncio.sleep(0)
        for connection in tuple(self._connections):
            connection.abort(frames.NO_ERROR, "the server stops")
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    # for its connections

    def on_connected(self, connection: ServerConnection) -> None:
        """One more."""
        self._connections.add(connection)

    def on_lost(self, connection: ServerConnection) -> None:
        """One less."""
        self._connections.discard(connection)

    def knows(self, request: Request) -> bool:
        """Find the handler of a path; those of methods are few, other paths are not remembered."""
        handler = self._handlers.get(request.path)
        if handler is None:
            details = _Details(request.path, request.metadata)
            found = (generic.service(details) for generic in self._generic)
            handler = next((each for each in found if each is not None), None)
            if handler is None:
                return False
            self._handlers[request.path] = handler
        request.streams = handler.request_streaming
        return True

    def on_call(self, call: ServedCall) -> None:
        """Run its handler in a task of its own."""
        if len(self._tasks) >= self._limits.max_calls:
            text = f"Concurrent RPC limit exceeded: {self._limits.max_calls} calls run"
            call.finish(_Code.RESOURCE_EXHAUSTED, text)
            return
        handler = self._handlers[call.request.path]
        assert handler is not None
        call.task = asyncio.create_task(self._run(call, handler), name=f"call {call.request.path}")
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    async def _run(self, call: ServedCall, handler: grpc.RpcMethodHandler) -> None:
        """Run ``handler`` and end ``call`` with what came of it; over when that is out, so that answers which a client
        does not take are calls of its own as much as those that run."""
        try:
            await _answer(call, handler)
            call.finish(_Code.OK)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            call.finish(_Code.CANCELLED, "the call was cancelled")
        except Exception as error:  # noqa: BLE001 - supervisor: a fault ends its call alone, as in grpcio
            _log.exception("a handler of %s failed", call.request.path)
            call.finish(_Code.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")
        await call.sent()


async def _answer(call: ServedCall, handler: grpc.RpcMethodHandler) -> None:
    """Give the request to ``handler`` and send what it answers."""
    read: Callable[[bytes], Any] = handler.request_deserializer or bytes
    write: Callable[[Any], bytes] = handler.response_serializer or bytes
    if handler.request_streaming:
        given: Any = _each(call, read)
    else:
        raw = await call.message()
        if raw is None:
            return
        given = read(raw)
    if not handler.response_streaming:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await call.write(write(await behaviour(given, call)))
        return
    made = (handler.stream_stream if handler.request_streaming else handler.unary_stream)(given, call)
    if not hasattr(made, "__aiter__"):
        await made
        return
    async with aclosing(made) as answers:
        async for answer in answers:
            await call.write(write(answer))


async def _each(call: ServedCall, read: Callable[[bytes], Any]) -> Any:
    async for raw in call.messages():
        yield read(raw)


def _bound(address: str, reuse_port: bool) -> socket.socket:
    """A socket that holds ``address``."""
    if address.startswith("unix:"):
        made = socket.socket(socket.AF_UNIX)
        path = Path(address.removeprefix("unix:"))
        path.unlink(missing_ok=True)
        made.bind(str(path))
        return made
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, where = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(where)
        made.listen(_BACKLOG)  # a port that another one listens on is noticed now
    except OSError:
        made.close()
        raise
    return made
