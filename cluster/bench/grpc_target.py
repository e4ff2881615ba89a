"""A VllmEngine endpoint: one engine, or a router before many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ..router.wire import MODEL_KEY, SESSION_KEY
from .target import Outcome, Target


class GrpcTarget(Target):
    """Sends token ids and reads a stream."""

    def __init__(self, address: str, model: str, timeout: float) -> None:
        self._address = address
        self._model = model
        self._timeout = timeout
        self._ids = itertools.count()
        self._run = f"replay-{time.time_ns():x}"
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = pb_grpc.VllmEngineStub(self._channel)

    async def open(self) -> None:
        """Ask what is served."""
        try:
            info = await self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=30, metadata=self._metadata("")
            )
        except grpc.aio.AioRpcError as error:
            raise OSError(f"grpc://{self._address}: {error.code().name}: {error.details()}") from error
        self.vocabulary = max(2, info.vocab_size or 32_000)

    async def generate(
        self, tokens: Sequence[int], output_tokens: int, session: str, outcome: Outcome
    ) -> None:
        """One Generate call."""
        request = pb.GenerateRequest(
            request_id=f"{self._run}-{next(self._ids)}",
            tokenized=pb.TokenizedInput(input_ids=tokens),
            sampling_params=pb.SamplingParams(
                max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0
            ),
            stream=True,
        )
        outcome.sent = time.monotonic()
        try:
            async for answer in self._stub.Generate(
                request, timeout=self._timeout, metadata=self._metadata(session)
            ):
                now = time.monotonic()
                if outcome.first < 0:
                    outcome.first = now
                if answer.HasField("chunk"):
                    outcome.output_tokens += len(answer.chunk.token_ids)
                elif answer.HasField("complete"):
                    outcome.end = now
                    outcome.prompt_tokens = answer.complete.prompt_tokens
                    outcome.cached_tokens = answer.complete.cached_tokens
                    # Of a stream it may count the tokens of the last chunk alone.
                    outcome.output_tokens = max(outcome.output_tokens, answer.complete.completion_tokens)
        except grpc.aio.AioRpcError as error:
            outcome.error = f"{error.code().name}: {error.details()}"
        else:
            if outcome.end < 0:
                outcome.error = "the stream ended without an end of the answer"

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _metadata(self, session: str) -> tuple[tuple[str, str], ...]:
        pairs = ((MODEL_KEY, self._model), (SESSION_KEY, session))
        return tuple(pair for pair in pairs if pair[1])
