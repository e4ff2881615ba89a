"""A real engine on a virtual NPU with a tiny model of random weights, served over gRPC: ``real_engine.py FOLDER``.

Few KV blocks, so that requests evict each other's; prints its address once it takes requests.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

BLOCK = 128
BLOCKS = 40
MAX_LEN = 2048


async def main(folder: Path) -> None:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from npufleet.cluster.engine.service import serve_engine
    from npufleet.cluster.router.command import stop_asked
    from npufleet.cluster.sim import tokenizer

    model = tokenizer.write(folder / "model", MAX_LEN)
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )
    args = AsyncEngineArgs(
        model=str(model),
        served_model_name=["tiny"],
        load_format="dummy",
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_events_config=events,
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
    asyncio.run(main(Path(sys.argv[1])))
