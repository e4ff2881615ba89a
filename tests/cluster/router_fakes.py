"""A VllmEngine without a model, and helpers to put a router before several of them.

Run as a program it is one engine in its own process: ``router_fakes.py PORT [NAME]``. SIGUSR1 makes it slow, SIGUSR2
well again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.endpoints import EngineEndpoint, EngineState, Snapshot
from npufleet.cluster.router.server import RouterHandle, serve_router
from npufleet.cluster.router.settings import RouterSettings

MODEL = "tiny"
QUICK = RouterSettings(
    front=os.environ.get("NPUFLEET_TEST_FRONT", "grpcio"),
    probe_interval=0.1,
    probe_timeout=5,
    recovery_interval=0.05,
    load_interval=0.1,
    reconnect_backoff=0.2,
)


@dataclass(eq=False)
class FakeEngine(vllm_engine_pb2_grpc.VllmEngineServicer, health_pb2_grpc.HealthServicer):
    """Streams max_tokens tokens that depend on the prompt alone; its attributes make it misbehave."""

    name: str = "fake"
    port: int = 0
    delay: float = 0.0  # seconds before each token
    fail_at: int | None = None  # the token before which Generate fails
    fail_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    greets: bool = True  # it sends its headers before it begins to work
    healthy: bool = True
    loads: list[pb.SchedulerLoad] = field(default_factory=list)
    ranks: int = 1
    role: str = "both"
    connector: str = ""  # of KV transfers; with it a request for one token tells where its blocks are
    events: asyncio.Queue[common_pb2.KvEventBatch] | None = (
        None  # what SubscribeKvEvents says, in place of a number
    )
    options: tuple[tuple[str, int], ...] = ()
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
    credentials: tuple[Path, Path, Path, bool] | None = None  # CA, certificate, key, clients must show one

    seen: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    time_left: list[float | None] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: set[int] = field(default_factory=set)  # Generate calls that have not ended
    aborted: list[str] = field(default_factory=list)
    flushed: int = 0
    server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeEngine:
        options = [("grpc.so_reuseport", 0), *self.options]
        self.server = grpc.aio.server(interceptors=self.interceptors, options=options)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self.server)
        if self.credentials is None:
            self.port = self.server.add_insecure_port(self.address)
        else:
            ca, certificate, key = (path.read_bytes() for path in self.credentials[:3])
            mutual = self.credentials[3]
            shown = grpc.ssl_server_credentials([(key, certificate)], ca if mutual else None, mutual)
            self.port = self.server.add_secure_port(self.address, shown)
        await self.server.start()
        return self

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def Generate(self, request, context):
        self.seen.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left.append(context.time_remaining())
        if self.greets:
            await context.send_initial_metadata((("x-fake", self.name),))
        base = sum(request.tokenized.input_ids) or len(request.text)
        count = request.sampling_params.max_tokens
        me = len(self.seen)
        self.running.add(me)
        try:
            for i in range(count):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.fail_at == i:
                    await context.abort(self.fail_code, f"fake failure of {self.name}")
                if request.request_id in self.aborted:
                    yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="abort"))
                    return
                chunk = pb.GenerateStreamChunk(token_ids=[(base + i) % 50000], completion_tokens=1)
                yield pb.GenerateResponse(chunk=chunk)
        except (asyncio.CancelledError, GeneratorExit):  # grpc.aio ends a handler in either way
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(me)
        done = pb.GenerateComplete(finish_reason="length", completion_tokens=count)
        if self.connector == "NixlConnector" and "do_remote_decode" in request.kv_transfer_params_json:
            done.kv_transfer_params_json = json.dumps(
                {"do_remote_prefill": True, "remote_engine_id": self.name}
            )
        context.set_trailing_metadata((("x-fake-done", str(count)),))
        yield pb.GenerateResponse(complete=done)

    async def Embed(self, request, context):
        if self.fail_at == 0:
            await context.abort(self.fail_code, f"fake failure of {self.name}")
        return pb.EmbedResponse(embedding=[float(len(request.tokenized.input_ids))], embedding_dim=1)

    async def Abort(self, request, context):
        self.aborted.extend(request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(served_model_name=MODEL, model_path=self.name, vocab_size=50000)

    async def GetServerInfo(self, request, context):
        await context.send_initial_metadata((("x-features", f"some of {self.name}"),))
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(self.role, "kv_both")
        return pb.GetServerInfoResponse(
            server_type=self.name,
            data_parallel_size=self.ranks,
            kv_connector=self.connector,
            kv_role=kv_role if self.connector else "",
            kv_engine_id=f"kv-{self.name}" if self.connector else "",
        )

    async def GetLoads(self, request, context):
        return pb.GetLoadsResponse(version="fake", dp_rank_count=len(self.loads), loads=self.loads)

    async def GetTokenizer(self, request, context):
        for part in (b"zip", b"bytes"):
            yield common_pb2.GetTokenizerChunk(data=part)

    async def FlushCache(self, request, context):
        self.flushed += 1
        return common_pb2.FlushCacheResponse(success=self.healthy, message="flushed")

    async def SubscribeKvEvents(self, request, context):
        if self.events is None:
            yield common_pb2.KvEventBatch(sequence_number=len(self.name))
            await asyncio.Event().wait()
        while True:
            yield await self.events.get()

    async def HealthCheck(self, request, context):
        return pb.HealthCheckResponse(healthy=self.healthy)

    async def Check(self, request, context):
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self.healthy else status.NOT_SERVING)


class ListSource:
    """An endpoint source that the test writes."""

    def __init__(self, *endpoints: EngineEndpoint) -> None:
        self._version = 0
        self._changed = asyncio.Event()
        self.put(*endpoints)

    def put(self, *endpoints: EngineEndpoint, epoch: str = "one") -> None:
        self._version += 1
        self.snapshot = Snapshot(epoch=epoch, version=self._version, endpoints=endpoints)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> AsyncIterator[Snapshot]:
        while True:
            changed = self._changed
            yield self.snapshot
            await changed.wait()


def endpoint(
    engine: FakeEngine, *, model: str = MODEL, state: EngineState = EngineState.READY
) -> EngineEndpoint:
    return EngineEndpoint(
        engine_id=engine.name,
        model=model,
        address=engine.address,
        metrics_url="",
        state=state,
        ranks=engine.ranks,
        role=engine.role,
        kv_connector=engine.connector,
        kv_engine_id=f"kv-{engine.name}" if engine.connector else "",
    )


@dataclass(eq=False)
class Fleet:
    """Running fakes behind a running router, with a stock stub."""

    engines: list[FakeEngine]
    source: ListSource
    router: RouterHandle
    channel: grpc.aio.Channel
    stub: vllm_engine_pb2_grpc.VllmEngineStub

    def served(self) -> list[int]:
        """How many Generate calls reached each engine."""
        return [len(engine.seen) for engine in self.engines]

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def fleet(
    *engines: FakeEngine,
    policy: str = "round-robin",
    settings: RouterSettings = QUICK,
    source: ListSource | None = None,
    wait: bool = True,
    keys: Keys | None = None,
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            if engine.server is None:
                await engine.start()
                stack.push_async_callback(engine.stop)
        source = source or ListSource(*map(endpoint, engines))
        router = await serve_router(source, policy=policy, settings=settings, keys=keys)
        stack.push_async_callback(router.close, 0.0)
        channel = grpc.aio.insecure_channel(router.address)
        stack.push_async_callback(channel.close)
        if wait:
            await router.wait_ready(10)
            assert len(router.picker.pool.members()) == len(source.snapshot.endpoints)
            await until(lambda: all(m.pickable for m in router.picker.pool.members()))
        yield Fleet(list(engines), source, router, channel, vllm_engine_pb2_grpc.VllmEngineStub(channel))


def generate_request(
    tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3), request_id: str = "r"
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=tokens),
        stream=True,
    )


async def until(condition, seconds: float = 10.0) -> None:
    """Wait for something that the test knows will come; it fails rather than hangs if it does not."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def tokens_of(call) -> list[int]:
    """The tokens of a Generate stream."""
    return [token async for answer in call for token in answer.chunk.token_ids]


async def _main(port: int, name: str) -> None:
    engine = await FakeEngine(name=name, port=port, delay=0.005).start()
    print(engine.port, flush=True)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, engine, "delay", 0.25)  # slow
    loop.add_signal_handler(signal.SIGUSR2, setattr, engine, "delay", 0.005)  # and well again
    await engine.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "fake"))
