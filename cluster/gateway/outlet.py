"""The answer to one request below ASGI, for bytes that need nothing of what stands between.

A message of a stream passes five ``send`` functions on its way through ASGI, none of which looks at it. :class:`Outlet`
writes to the connection as uvicorn would. It leans on uvicorn's object for a request and its answer; a test compares
its members with the installed release, and what is under another server has no outlet.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from .http import Send


class Outlet:
    """Where the answer of a request goes."""

    __slots__ = ("_cycle", "bodies")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle: Any = cycle
        self.bodies = 0  # messages with a part of the answer's body that came through ASGI

    @property
    def open(self) -> bool:
        """True where a part of the answer can be written now: it has begun, has no length and no end yet, and its
        client is there and keeps up.
        """
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.disconnected or cycle.response_complete or cycle.flow.write_paused
        )

    def write(self, data: bytes) -> None:
        """Send ``data``, not empty, as the next chunk (RFC 9112, section 7.1); nothing once the answer is over.

        Raises ``ConnectionAbortedError`` where the client has left and the server does not know: with a further request
        behind this one on the connection, uvicorn tells only that one.
        """
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.transport.is_closing():
            raise ConnectionAbortedError("the client has left")
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def outlet_under(send: Send) -> Outlet | None:
    """The outlet that a server's ``send`` leads to; None where it is not uvicorn's own."""
    cycle = getattr(send, "__self__", None)
    return Outlet(cycle) if isinstance(cycle, RequestResponseCycle) else None


OUTLET: ContextVar[Outlet | None] = ContextVar("npufleet_gateway_outlet", default=None)
"""Of the request that is being answered."""
