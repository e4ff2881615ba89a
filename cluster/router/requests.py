"""Requests that run through the front now, so that Abort finds them and ids never clash.

A request id is its client's own; two clients may use the same one at once. Engines know a request by the id
the router gives it: the client's, unless that is empty or taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from npufleet.cluster.router.picker import Lease


@dataclass(eq=False, kw_only=True, slots=True)
class LiveRequest:
    """One running Generate or Embed call."""

    client_id: str  # the id its client gave, perhaps ""
    engine_request_id: str  # the id engines know it by
    peer: str  # the client's connection
    lease: Lease | None = None  # the engine it is on now
    aborted: bool = False


@dataclass(slots=True)
class LiveRequests:
    """All running requests of one front."""

    _by_id: dict[str, list[LiveRequest]] = field(default_factory=dict)
    _engine_ids: set[str] = field(default_factory=set)

    @contextmanager
    def enter(self, client_id: str, peer: str) -> Iterator[LiveRequest]:
        """Hold a request in the table while it runs."""
        engine_id = client_id
        while not engine_id or engine_id in self._engine_ids:
            engine_id = f"{client_id or 'router'}-{secrets.token_hex(6)}"
        live = LiveRequest(client_id=client_id, engine_request_id=engine_id, peer=peer)
        self._engine_ids.add(engine_id)
        self._by_id.setdefault(client_id, []).append(live)
        try:
            yield live
        finally:
            self._engine_ids.discard(engine_id)
            same = self._by_id[client_id]
            same.remove(live)
            if not same:
                del self._by_id[client_id]

    def __len__(self) -> int:
        return len(self._engine_ids)

    def find(self, client_id: str, peer: str) -> list[LiveRequest]:
        """The requests that an Abort of ``client_id`` from ``peer`` means.

        Those of the same connection; without any, a request of that id on another connection, if there is
        just one. Raises ValueError where several connections run that id and none is the caller's: one client
        must not end another's request.
        """
        same_id = self._by_id.get(client_id, []) if client_id else []
        own = [live for live in same_id if live.peer == peer]
        if own or len(same_id) <= 1:
            return own or list(same_id)
        raise ValueError(
            f"request id {client_id!r} is running on {len(same_id)} other connections; cancel the call itself"
        )
