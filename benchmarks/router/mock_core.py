"""The engine core of a mock engine, as vLLM's own API server speaks to one over ZeroMQ (``vllm/v1/engine/core.py``).

The frontend binds both sockets; the core says first that it is ready, then takes requests, aborts and calls of its
methods, and hands out tokens: the first at once, further ones of all open streams together in each step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

IDENTITY = (0).to_bytes(2, "little")  # of rank 0
RESULTS = {"get_supported_tasks": ("generate",), "reset_mm_cache": None}


def addresses(folder: Path) -> tuple[str, str]:
    """Where the frontend in ``folder`` listens: for what goes in, and for what comes out."""
    return f"ipc://{folder / 'in'}", f"ipc://{folder / 'out'}"


class MockCore:
    """Answers each request with as many of ``token`` as it may have."""

    def __init__(self, folder: Path, token: int) -> None:
        """``folder``: of the sockets' files."""
        context = zmq.asyncio.Context()
        self._in, self._out = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        self._in.setsockopt(zmq.IDENTITY, IDENTITY)
        for made, address in zip((self._in, self._out), addresses(folder), strict=True):
            made.connect(address)
        self._token = token
        self._left: dict[str, int] = {}  # tokens of each open stream
        self._encoder, self._requests = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self._calls = MsgpackDecoder()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._in.send(b"")
        while True:
            kind, *frames = await self._in.recv_multipart()
            match EngineCoreRequestType(bytes(kind)):
                case EngineCoreRequestType.ADD:
                    request = self._requests.decode(frames)
                    self._left[request.request_id] = request.sampling_params.max_tokens
                    await self._say([self._next(request.request_id)])
                case EngineCoreRequestType.ABORT:
                    for name in self._calls.decode(frames):
                        self._left.pop(name, None)
                case EngineCoreRequestType.UTILITY:
                    _, call, method, _ = self._calls.decode(frames)
                    told = UtilityOutput(call_id=call, result=UtilityResult(RESULTS.get(method)))
                    await self._send(EngineCoreOutputs(utility_output=told))

    async def step(self) -> None:
        """One token of each open stream."""
        if self._left:
            await self._say([self._next(name) for name in list(self._left)])

    def _next(self, name: str) -> EngineCoreOutput:
        self._left[name] -= 1
        if self._left[name]:
            return EngineCoreOutput(request_id=name, new_token_ids=[self._token])
        del self._left[name]
        return EngineCoreOutput(
            request_id=name, new_token_ids=[self._token], finish_reason=FinishReason.LENGTH
        )

    async def _say(self, outputs: list[EngineCoreOutput]) -> None:
        ended = {each.request_id for each in outputs if each.finish_reason is not None}
        await self._send(EngineCoreOutputs(outputs=outputs, finished_requests=ended or None))

    async def _send(self, message: Any) -> None:
        await self._out.send_multipart(self._encoder.encode(message))
