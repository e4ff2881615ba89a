"""A real engine on a virtual NPU with a tiny model of random weights, served over gRPC.

``real_engine.py FOLDER [JSON]``: few KV blocks, so that requests evict each other's, unless the vLLM arguments of JSON
say otherwise; prints its address once it takes requests. :class:`Engine` is such a process, :func:`routed` a router
before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_proto import vllm_engine_pb2_grpc

    from npufleet.cluster.endpoints import EngineEndpoint
    from npufleet.cluster.router.server import RouterHandle
    from npufleet.cluster.router.settings import RouterSettings

    from .router_fakes import ListSource

ROOT = Path(__file__).resolve().parents[2]

BLOCK = 128
BLOCKS = 40
MAX_LEN = 2048


class Engine:
    """The engine's process; ``life`` counts its starts, since a restarted engine has a new id."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.folder = folder
        self.arguments = arguments  # of vLLM, over those of :func:`main`
        self.life = 0
        self.process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> EngineEndpoint:
        from npufleet.cluster.endpoints import EngineEndpoint, EngineState

        self.life += 1
        folder = self.folder / str(self.life)
        folder.mkdir()
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.real_engine", str(folder), json.dumps(self.arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"listens on (\S+)", line):
                self.address = found.group(1)
                return EngineEndpoint(
                    engine_id=f"real-{self.life}",
                    model="tiny",
                    address=self.address,
                    metrics_url="",
                    state=EngineState.READY,
                )
        raise AssertionError(f"the engine did not start:\n{(folder / 'log').read_text()[-3000:]}")

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its core too, which would go on alone
            self.process.wait()


@asynccontextmanager
async def routed(
    engine: Engine, settings: RouterSettings | None = None
) -> AsyncIterator[tuple[RouterHandle, ListSource, vllm_engine_pb2_grpc.VllmEngineStub]]:
    """``engine``, started, behind a router, with a stub of the router."""
    endpoint = await asyncio.to_thread(engine.start)
    try:
        async with router_before(endpoint, settings) as made:
            yield made
    finally:
        engine.kill()


@asynccontextmanager
async def router_before(
    endpoint: EngineEndpoint, settings: RouterSettings | None = None
) -> AsyncIterator[tuple[RouterHandle, ListSource, vllm_engine_pb2_grpc.VllmEngineStub]]:
    """A router before a running engine, with a stub of the router."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2_grpc

    from npufleet.cluster.router.server import serve_router

    from .router_fakes import QUICK, ListSource, until

    source = ListSource(endpoint)
    router = await serve_router(source, settings=settings or QUICK)
    channel = grpc.aio.insecure_channel(router.address)
    try:
        await router.wait_ready(60)
        await until(lambda: len(router.picker.events.following) == 1, 30)
        yield router, source, vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        await channel.close()
        await router.close(0.0)


async def main(folder: Path, arguments: dict[str, Any]) -> None:
    """Serve until asked to stop."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from npufleet.cluster.engine.service import serve_engine
    from npufleet.cluster.router.command import stop_asked
    from npufleet.cluster.sim import tokenizer

    length = arguments.setdefault("max_model_len", MAX_LEN)
    model = tokenizer.write(folder / "model", length)
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )
    usual = {
        "load_format": "dummy",
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": True,
    }
    args = AsyncEngineArgs(
        model=str(model), served_model_name=["tiny"], kv_events_config=events, **{**usual, **arguments}
    )
    engine = AsyncLLM.from_engine_args(args)
    stop = stop_asked()
    server = await serve_engine(engine)
    print(f"engine listens on {server.address}", flush=True)
    await stop.wait()
    await server.stop()
    engine.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
