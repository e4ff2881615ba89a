"""Calls whose channel was closed or dropped under them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc


@contextmanager
def closed_is_unavailable() -> Iterator[None]:
    """Raise ``AioRpcError`` UNAVAILABLE where a call that is waited for here is cancelled, not whoever waits.

    That is how a channel ends its calls when it is closed, and over grpcio also when it is dropped. To a request it is
    an engine that was lost, and a ``CancelledError`` would end its task without a word.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the router closed its link to the engine"
        ) from error
