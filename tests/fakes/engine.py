"""A VllmEngine server without a model: deterministic tokens, scripted delays, faults and death.

Pure Python over grpc.aio; imports neither torch nor vLLM. The answer to a prompt is ``answer(prompt_ids)``,
ended by the end token unless ``max_tokens`` comes first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_servicer.tokenizer_bundle import TokenizerBundle, tokenizer_chunks

from npufleet.cluster.proto.extension import METADATA_LIMIT, ExtensionError, from_metadata
from npufleet.cluster.proto.features import advertise

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def echo(prompt: list[int]) -> list[int]:
    """The default answer: the prompt itself."""
    return prompt


@dataclass(kw_only=True)
class Script:
    """How the engine behaves; may be changed while it runs."""

    answer: Callable[[list[int]], list[int]] = echo
    first_delay_s: float = 0.0
    token_delay_s: float = 0.0
    tokens_per_chunk: int = 1
    refuse: tuple[grpc.StatusCode, str] | None = None  # every Generate fails so at once
    fail_after: int | None = None  # tokens after which a Generate fails ...
    fail_with: tuple[grpc.StatusCode, str] = (grpc.StatusCode.INTERNAL, "EngineCore encountered an issue.")
    die_after: int | None = None  # tokens after which the whole server is gone
    freeze_after: int | None = None  # tokens after which nothing comes any more
    finish_reason: str = ""  # instead of what follows from the answer
    faults_left: list[int] | None = (
        None  # one number, shared: how many more faults may happen; None: no limit
    )

    def fault(self) -> bool:
        """True where a scripted fault may happen now; it then counts."""
        if self.faults_left is None:
            return True
        self.faults_left[0] -= 1
        return self.faults_left[0] >= 0


@dataclass(kw_only=True)
class Seen:
    """One Generate call as the engine saw it."""

    request: pb.GenerateRequest
    fields: dict[str, Any]
    metadata: dict[str, str | bytes]
    sent: int = 0
    cancelled: bool = False
    done: bool = False


@dataclass
class FakeEngine(pb_grpc.VllmEngineServicer):
    """One fake engine. ``stock``: behave like a server that knows nothing of the metadata extension."""

    tokenizer_dir: Path
    model: str = "fake"
    end_token: int = 256
    vocab_size: int = 260
    max_model_len: int = 512
    stock: bool = False
    script: Script = field(default_factory=Script)
    seen: list[Seen] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._started = time.time()
        self._running: dict[str, asyncio.Event] = {}

    @property
    def address(self) -> str:
        """host:port of the server."""
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> FakeEngine:
        """Listen on loopback; port 0 picks one."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 64 << 20),
                # as engines have them: the soft limit of 8 KiB refuses at random between itself and the other
                ("grpc.max_metadata_size", METADATA_LIMIT),
                ("grpc.absolute_max_metadata_size", METADATA_LIMIT),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 100),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        pb_grpc.add_VllmEngineServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self.set_serving(True)
        await self._server.start()
        return self

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers."""
        for name in ("", SERVICE):
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self) -> None:
        """Gone at once: running streams break, the port closes."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=0)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        metadata = dict(context.invocation_metadata() or ())
        try:
            fields = {} if self.stock else from_metadata(tuple(metadata.items()))
        except ExtensionError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        seen = Seen(request=request, fields=fields, metadata=metadata)
        self.seen.append(seen)
        stop = self._running[request.request_id] = asyncio.Event()
        try:
            async for response in self._answer(request, seen, stop, context):
                yield response
            seen.done = True
        except (asyncio.CancelledError, GeneratorExit):  # in the midst of a token, or while one is sent
            seen.cancelled = True
            raise
        finally:
            self._running.pop(request.request_id, None)

    async def _answer(
        self, request: pb.GenerateRequest, seen: Seen, stop: asyncio.Event, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        script, params = self.script, request.sampling_params
        if script.refuse is not None and script.fault():
            await context.abort(*script.refuse)
        prompt = list(request.tokenized.input_ids)
        limit = params.max_tokens if params.HasField("max_tokens") else self.max_model_len - len(prompt)
        tokens = [*script.answer(prompt), self.end_token][:limit]
        ended = tokens[-1] == self.end_token
        await asyncio.sleep(script.first_delay_s)
        sent: list[int] = []
        while len(sent) < len(tokens) and not stop.is_set():
            step = tokens[len(sent) : len(sent) + script.tokens_per_chunk]
            await self._misbehave(len(sent), context)
            if sent and script.token_delay_s:
                await asyncio.sleep(script.token_delay_s)
            if request.stream:
                yield pb.GenerateResponse(
                    chunk=self._part(pb.GenerateStreamChunk, seen, prompt, step, not sent)
                )
            sent += step
            seen.sent = len(sent)
        await self._misbehave(len(sent), context)
        final = self._part(pb.GenerateComplete, seen, prompt, step if request.stream else sent, True)
        reason = "abort" if stop.is_set() else "stop" if ended else "length"
        final.finish_reason = script.finish_reason or reason
        yield pb.GenerateResponse(complete=final)

    async def _misbehave(self, sent: int, context: grpc.aio.ServicerContext) -> None:
        script = self.script
        if script.fail_after == sent and script.fault():
            await context.abort(*script.fail_with)
        if script.die_after == sent and script.fault():
            task = asyncio.create_task(self.stop())
            await asyncio.sleep(60)
            await task
        if script.freeze_after == sent and script.fault():
            await asyncio.Event().wait()

    def _part(self, kind: Any, seen: Seen, prompt: list[int], tokens: list[int], with_prompt: bool) -> Any:
        params = seen.request.sampling_params
        part = kind(prompt_tokens=len(prompt), completion_tokens=len(tokens), cached_tokens=len(prompt) // 2)
        (part.token_ids if kind is pb.GenerateStreamChunk else part.output_ids).extend(tokens)
        ranked = bool(seen.fields.get("logprob_ranks"))
        if params.HasField("logprobs"):
            for token in tokens:
                part.output_logprobs.token_ids.append(token)
                part.output_logprobs.token_logprobs.append(logprob_of(token, rank_of(token)))
                _alternatives(part.output_logprobs.top_logprobs.add(), token, params.logprobs, ranked)
        if params.HasField("prompt_logprobs") and with_prompt:
            for position, token in enumerate(prompt):
                entry = part.input_logprobs.token_logprobs.add()
                part.input_logprobs.token_ids.append(token)
                top = part.input_logprobs.top_logprobs.add()
                if position:
                    entry.value = logprob_of(token, rank_of(token))
                    _alternatives(top, token, params.prompt_logprobs, ranked)
        return part

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        self.aborted.extend(request.request_ids)
        for request_id in request.request_ids:
            if (stop := self._running.get(request_id)) is not None:
                stop.set()
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        await self._advertise(context)
        return pb.GetModelInfoResponse(
            model_path=str(self.tokenizer_dir),
            is_generation=True,
            max_context_length=self.max_model_len,
            vocab_size=self.vocab_size,
            served_model_name=self.model,
            tokenizer_path=str(self.tokenizer_dir),
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[self.end_token],
            max_req_input_len=self.max_model_len,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        await self._advertise(context)
        return pb.GetServerInfoResponse(
            active_requests=len(self._running),
            uptime_seconds=time.time() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=16,
        )

    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        running = len(self._running)
        load = pb.SchedulerLoad(num_running_reqs=running, num_total_reqs=running, max_running_requests=256)
        return pb.GetLoadsResponse(dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        for chunk in tokenizer_chunks(*TokenizerBundle.build(self.tokenizer_dir)):
            yield chunk

    async def _advertise(self, context: grpc.aio.ServicerContext) -> None:
        if not self.stock:
            await context.send_initial_metadata(advertise({"max_logprobs": 20}))


def rank_of(token: int) -> int:
    """The rank that the fake gives a token it chose: 1 to 4."""
    return token % 4 + 1


def logprob_of(token: int, rank: int) -> float:
    """Its log probability: a quarter less per rank, exact in binary."""
    return -0.25 * rank


def _alternatives(top: Any, chosen: int, count: int, ranked: bool) -> None:
    """Fill a TopLogProbs as an engine does: the chosen token first, then the most likely ones in order.

    The alternative of rank r is token ``(chosen + r) % 256``, but the chosen one sits at its own rank.
    """
    rank = rank_of(chosen)
    others = [((chosen + r) % 256, r) for r in range(1, count + 1) if r != rank]
    entries = [(chosen, rank), *others]
    if not ranked:
        entries = entries[:count]
    for token, place in entries:
        top.token_ids.append(token)
        top.values.append(logprob_of(token, place))
    if ranked:
        top.token_ids.append(rank)
