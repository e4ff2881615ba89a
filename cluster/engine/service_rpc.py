"""The VllmEngine service of one engine: the stock servicer, and what the messages lack.

:class:`EngineService` reads the extension metadata of a call, answers bad requests with ``INVALID_ARGUMENT``,
says which extension fields it understands, fills the live members of ``GetServerInfo`` and spells out
log-probability ranks for a caller that asks for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_servicer.vllm.config_view import EngineConfigView
from smg_grpc_servicer.vllm.kv_events import rank_sources_for
from smg_grpc_servicer.vllm.model_info import eos_token_ids_with_generation_config
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

from ..proto.extension import RANK_KEY, ExtensionError, from_metadata
from ..proto.features import advertise
from .kv_events import KvEventHub, SlowSubscriber
from .view import EXTENSION, EngineView

_ALL_PENDING = 1 << 40
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

logging.getLogger("smg_grpc_servicer.vllm.servicer").addFilter(
    # One line per request at INFO says nothing the metrics do not; warnings and errors stay.
    lambda record: record.levelno > logging.INFO
)


def spell_out_ranks(
    target: Any, token_ids: Iterable[int], entries: Iterable[Mapping[int, Any] | None] | None
) -> None:
    """Fill ``target.top_logprobs`` (OutputLogProbs or InputLogProbs) as the extension field logprob_ranks
    says.

    ``entries``: per position the engine's map token id -> Logprob with the chosen token first, or None for
    the first prompt token. Each gets all its alternatives, then one id without a value: the rank of the
    chosen token.
    """
    del target.top_logprobs[:]
    for token_id, entry in zip(token_ids, entries or (), strict=False):
        top = target.top_logprobs.add()
        if entry is None or token_id not in entry:
            continue
        top.token_ids.extend(entry)
        top.values.extend(logprob.logprob for logprob in entry.values())
        top.token_ids.append(entry[token_id].rank or 0)


class EngineService(VllmEngineServicer):
    """``vllm.grpc.engine.VllmEngine`` over one AsyncLLM, with the metadata extension."""

    def __init__(self, async_llm: Any, *, start_time: float | None = None) -> None:
        """``async_llm``: the engine, running; ``start_time``: seconds since the epoch, now by default."""
        super().__init__(EngineView(async_llm), time.time() if start_time is None else start_time)
        self.draining = False
        self.active = 0  # Generate streams open now
        self.idle = asyncio.Event()  # set while none is open
        self.idle.set()
        self.last_token = 0.0  # monotonic seconds, 0 before the first
        self.last_request = 0.0  # seconds since the epoch, 0 before the first
        config = EngineConfigView(getattr(async_llm, "vllm_config", None))
        self._ranks: int = config.parallel.data_parallel_size or 1
        self._headers = advertise({"max_logprobs": async_llm.model_config.max_logprobs})
        self.events: KvEventHub | None = None

    def start_events(self) -> None:
        """Begin to relay the engine's KV events, if it publishes any; before its first request."""
        config = self._kv_events_config
        if config is not None:
            sources = rank_sources_for(config, self.engine)
            self.events = KvEventHub(sources, self._load_record, topic=str(config.topic or ""))
            self.events.start()

    async def stop_events(self) -> None:
        """End all subscriptions."""
        if self.events is not None:
            await self.events.close()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream one generation. INVALID_ARGUMENT for what the request got wrong; UNAVAILABLE, before
        anything was done, while draining or with a dead engine; INTERNAL when the engine dies under the
        request."""
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this engine is draining; ask another one")
        if self.engine.errored:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this engine is dead; ask another one")
        try:
            EXTENSION.set(from_metadata(context.invocation_metadata()))
            _check(request)
        except ExtensionError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not request.request_id:
            request.request_id = f"grpc-{uuid.uuid4().hex}"
        rank = _rank_wished(context.invocation_metadata() or (), self._ranks)
        if rank is not None and not request.HasField("data_parallel_rank"):
            request.data_parallel_rank = rank
        self.last_request = time.time()
        self.active += 1
        self.idle.clear()
        try:
            async for response in super().Generate(request, context):
                self.last_token = time.monotonic()
                yield response
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """What the engine serves; the initial metadata tells its features.

        Its end tokens are all those that end an answer; the stock servicer leaves those of the generation config out,
        and a router that goes on with an answer elsewhere must know whether it had ended.
        """
        await context.send_initial_metadata(self._headers)
        info = await super().GetModelInfo(request, context)
        del info.eos_token_ids[:]
        info.eos_token_ids.extend(eos_token_ids_with_generation_config(self.engine.model_config))
        return info

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """How the engine is configured and how busy it is; the initial metadata tells its features."""
        await context.send_initial_metadata(self._headers)
        info = await super().GetServerInfo(request, context)
        info.server_type = "vllm-grpc"
        info.active_requests = self.active
        info.uptime_seconds = time.time() - self.start_time
        info.last_receive_timestamp = self.last_request
        return info

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """What the prefix cache holds, then each change, with the engine's load beside.

        UNIMPLEMENTED where the engine publishes no events; OUT_OF_RANGE for a cursor: a subscription begins
        with a snapshot instead; DATA_LOSS for a subscriber that does not keep up.
        """
        if self.events is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine publishes no KV cache events")
            return
        if request.start_sequence_number:
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE, "subscribe from 0: the cache's state comes first"
            )
        try:
            async with aclosing(self.events.subscribe()) as batches:
                async for batch in batches:
                    yield batch
        except SlowSubscriber as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"{error}; subscribe again")

    def _scheduler_loads(self) -> list[pb.SchedulerLoad]:
        loads = super()._scheduler_loads()
        for load in loads:
            load.num_waiting_uncached_tokens = self._pending_tokens(load.dp_rank)
        return loads

    def _load_record(self, dp_rank: int | None) -> common_pb2.EngineLoad | None:
        record = super()._load_record(dp_rank)
        if record is not None:
            record.waiting_uncached_tokens = self._pending_tokens(dp_rank or 0)
        return record

    def _pending_tokens(self, rank: int) -> int:
        """Tokens to compute for all requests without output.

        The stock servicer leaves out those that the engine has admitted; but a long prompt is computed for many
        steps after that, and whoever comes next waits for all of it.
        """
        return self._loads.estimate(_ALL_PENDING, rank=rank).queued_token_work

    @staticmethod
    def _chunk_response(
        output: Any,
        completion: Any = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        is_first_chunk: bool = False,
    ) -> pb.GenerateResponse:
        response = VllmEngineServicer._chunk_response(
            output, completion, num_logprobs, num_prompt_logprobs, is_first_chunk
        )
        if EXTENSION.get().get("logprob_ranks"):
            _add_ranks(response.chunk, output, completion)
        return response

    @staticmethod
    def _complete_response(
        output: Any,
        completion: Any = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        media_identity: Any = None,
    ) -> pb.GenerateResponse:
        response = VllmEngineServicer._complete_response(
            output, completion, num_logprobs, num_prompt_logprobs, media_identity
        )
        if EXTENSION.get().get("logprob_ranks"):
            _add_ranks(response.complete, output, completion)
        return response


def _rank_wished(metadata: Iterable[tuple[str, str | bytes]], ranks: int) -> int | None:
    """The one of ``ranks`` data-parallel ranks that a router's metadata names."""
    for key, value in metadata:
        if key == RANK_KEY and str(value).isdecimal() and int(value) < ranks > 1:
            return int(value)
    return None


def _add_ranks(message: Any, output: Any, completion: Any) -> None:
    if completion is not None and message.HasField("output_logprobs"):
        spell_out_ranks(message.output_logprobs, completion.token_ids, completion.logprobs)
    if message.HasField("input_logprobs"):
        spell_out_ranks(message.input_logprobs, output.prompt_token_ids, output.prompt_logprobs)


def _check(request: pb.GenerateRequest) -> None:
    """Refuse what the stock servicer would let through to a crash or a silent default."""
    kind = request.WhichOneof("input")
    if kind is None or (kind == "tokenized" and not request.tokenized.input_ids):
        raise ExtensionError("the prompt is empty: give input.tokenized.input_ids or input.text", "input")
    if kind == "text" and not request.text:
        raise ExtensionError("the prompt is empty: input.text has no characters", "input")
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ):
        value = getattr(request.sampling_params, name)
        if value != value or value in (float("inf"), float("-inf")):
            raise ExtensionError(f"sampling_params.{name} must be a finite number, got {value}", name)
