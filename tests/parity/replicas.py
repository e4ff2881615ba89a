"""Data-parallel replicas in processes of their own, each with prompts of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM

from .checkpoints import VOCAB
from .engines import SMALL, greedy, start_method, tokens
from .reference import prompts

REPLICAS = 2
DEADLINE = 420.0
PAUSE = 2.0  # for engine cores to end their wave of steps, as in vLLM's own offline examples

Found = tuple[list[tuple[int, ...]], tuple[int, ...], list[Any]]
"""The tokens of a replica's share of the standard prompts, those of its answer to the third prompt, and what its
workers told."""
Ask = Callable[[Any], Any]
"""What a worker is asked at the end; runs in its process."""


def run_replica(
    rank: int,
    port: int,
    path: str,
    steps: int,
    settings: dict[str, Any],
    ask: Ask | None,
    results: Any,
    finished: Any,
) -> None:
    """One replica, its engine core and workers in processes of their own."""
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(REPLICAS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
        VLLM_WORKER_MULTIPROC_METHOD=start_method(),
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # a function for the workers
    )
    llm = LLM(model=path, **{**SMALL, **settings})
    mine = prompts(VOCAB)[rank::REPLICAS]
    found = tokens(greedy(llm, mine, steps))
    # The other replica has one token to make, and then nothing to do but to take part.
    (alone,) = tokens(greedy(llm, [prompts(VOCAB)[2]], steps if rank == 0 else 1))
    results.put((rank, found, alone, llm.collective_rpc(ask) if ask else []))
    # An engine core that leaves while another still steps would leave that one waiting for it.
    finished.wait(DEADLINE)
    time.sleep(PAUSE)
    llm.llm_engine.engine_core.shutdown()


def run_replicas(
    path: Path, steps: int, settings: dict[str, Any], ask: Ask | None = None
) -> dict[int, Found]:
    """What each replica answered, by rank, once all of them have ended well.

    Raises:
        queue.Empty: a replica did not answer within ``DEADLINE`` seconds.
        RuntimeError: a replica ended with an error after its answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context(start_method())
    results, finished = context.Queue(), context.Barrier(REPLICAS)
    replicas = [
        context.Process(
            target=run_replica, args=(rank, port, str(path), steps, settings, ask, results, finished)
        )
        for rank in range(REPLICAS)
    ]
    for process in replicas:
        process.start()
    try:
        answers = [results.get(timeout=DEADLINE) for _ in replicas]
        for process in replicas:
            process.join(60)
        codes = [process.exitcode for process in replicas]
        if any(codes):
            raise RuntimeError(f"exit codes of the replicas: {codes}")
    finally:
        for process in replicas:
            process.terminate()
    return {rank: (mine, alone, told) for rank, mine, alone, told in answers}
