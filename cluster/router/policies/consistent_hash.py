"""Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016).

A request's key is its session, or else the first blocks of its prompt. The key leads to a place on a ring;
the request goes to the first engine from there that has less than its share of requests and a quarter more.
An engine that comes or goes moves only the keys next to it, and no hot key overloads one engine.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache

from npufleet.cluster.router.base import EngineLoad, Policy, RequestInfo
from npufleet.cluster.router.policies.least_load import waiting_work

POINTS = 64  # of each engine on the ring
SURPLUS = 1.25
KEY_TOKENS = 256  # of a prompt that make its key


def _place(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@lru_cache(maxsize=8)
def _ring(engine_ids: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Places on the ring in order, and whose they are."""
    points = sorted(
        (_place(f"{name}#{i}".encode()), at) for at, name in enumerate(engine_ids) for i in range(POINTS)
    )
    return [place for place, _ in points], [at for _, at in points]


class ConsistentHash(Policy):
    """The key's engine on a ring, with bounded load; without a key, the engine with the least work."""

    name = "consistent-hash"

    def filter(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """The first engine on the ring with room."""
        key = _key(request)
        if key is None:
            return engines
        places, owners = _ring(tuple(engine.engine_id for engine in engines))
        requests = [engine.requests() for engine in engines]
        most = math.ceil(SURPLUS * (sum(requests) + 1) / len(engines))
        start = bisect(places, key)
        for step in range(len(owners)):
            owner = owners[(start + step) % len(owners)]
            if requests[owner] < most:
                return [engines[owner]]
        raise AssertionError("not all engines can be above the mean")

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Work before a new request, in prompt tokens."""
        return waiting_work(engine)


def _key(request: RequestInfo) -> int | None:
    if request.session:
        return _place(request.session.encode())
    head = request.prompt.anchor(KEY_TOKENS) if request.prompt is not None else b""
    return _place(head) if head else None
