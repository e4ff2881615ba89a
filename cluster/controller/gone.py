"""Engines and front ends that were killed: they say no goodbye, but their port is closed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..endpoints import EngineEndpoint

TIMEOUT_S = 1.0


async def closed(endpoints: Iterable[EngineEndpoint]) -> list[EngineEndpoint]:
    """Return those whose port refuses a connection.

    One that does not answer may be busy, or its node out of reach for a while; only a refusal proves that
    nobody listens any more.
    """
    asked = list(endpoints)
    refused = await asyncio.gather(*(refuses(endpoint.address) for endpoint in asked))
    return [endpoint for endpoint, gone in zip(asked, refused, strict=True) if gone]


async def refuses(address: str) -> bool:
    """Return whether ``address`` (HOST:PORT) refuses a connection."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), TIMEOUT_S)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
