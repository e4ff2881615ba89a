"""Follow an endpoint source for as long as a router lives, whatever happens to the source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from npufleet.cluster.endpoints import EndpointSource, Snapshot

_log = logging.getLogger(__name__)
RETRY = 1.0  # seconds


async def follow(source: EndpointSource, take: Callable[[Snapshot], None], retry: float = RETRY) -> NoReturn:
    """Hand each snapshot of ``source`` to ``take``. A source that ends or fails is asked again after ``retry``
    seconds, and so is one whose snapshot ``take`` cannot stand; the last snapshot stays what is known.
    """
    while True:
        try:
            async for snapshot in source.watch():
                take(snapshot)
            _log.warning("the endpoint source ended its watch; asking it again")
        except Exception:  # noqa: BLE001 - supervisor: a source must not be able to stop the router
            _log.exception("the endpoint source failed; the last known engines stay, asking it again")
        await asyncio.sleep(retry)
