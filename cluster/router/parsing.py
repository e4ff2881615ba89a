"""Messages of clients, parsed in the handler: what is none is theirs to mend, and no fault to be logged.

A deserializer of grpcio that raises ends the call as UNKNOWN and writes a trace for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

Asked = TypeVar("Asked", bound=Message)
Answer = TypeVar("Answer", bound=Message)


async def parsed(kind: type[Asked], raw: bytes, context: grpc.aio.ServicerContext) -> Asked:
    """The message of that ``kind`` in ``raw``; aborts the call with INVALID_ARGUMENT where there is none."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.DESCRIPTOR.full_name}")
        raise AssertionError("abort raises") from error


def unary(
    kind: type[Asked], behaviour: Callable[[Asked, grpc.aio.ServicerContext], Awaitable[Answer]]
) -> grpc.RpcMethodHandler:
    """The handler of a method that answers one message of ``kind`` with another one."""

    async def handle(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        answer = await behaviour(await parsed(kind, raw, context), context)
        return answer.SerializeToString()

    return grpc.unary_unary_rpc_method_handler(handle)
