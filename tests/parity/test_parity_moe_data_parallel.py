"""Data-parallel replicas that share their experts, against transformers.

Each replica has prompts of its own, so steps differ in size between them; at the end only the first has work and
the others take part with empty steps.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import Any

import pytest

from .checkpoints import VOCAB
from .conftest import STEPS
from .reference import prompts

REPLICAS = 2
DEADLINE = 420.0
PAUSE = 2.0  # for engine cores to end their wave of steps, as in vLLM's own offline examples


def run_replica(
    rank: int, port: int, path: str, settings: dict[str, Any], results: Any, finished: Any
) -> None:
    """One replica, its engine core and workers in processes of their own."""
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(REPLICAS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS="1",
    )
    from vllm import LLM

    from .engines import SMALL, greedy, tokens

    llm = LLM(model=path, **{**SMALL, **settings})
    mine = prompts(VOCAB)[rank::REPLICAS]
    found = tokens(greedy(llm, mine, STEPS))
    # The other replica has one token to make, and then nothing to do but to take part.
    (alone,) = tokens(greedy(llm, [prompts(VOCAB)[2]], STEPS if rank == 0 else 1))
    results.put((rank, found, alone))
    # An engine core that leaves while another still steps would leave that one waiting for it.
    finished.wait(DEADLINE)
    time.sleep(PAUSE)
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"enable_expert_parallel": True}, {}, {"enable_expert_parallel": True, "tensor_parallel_size": 2}],
    ids=["ep2", "split", "tp2-ep4"],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_replicas_share_experts(settings, mode, checkpoint_path, references):
    from .engines import GRAPHS

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results, finished = context.Queue(), context.Barrier(REPLICAS)
    given = {**settings, **(GRAPHS if mode == "graph" else {})}
    path = str(checkpoint_path("qwen3-moe"))
    replicas = [
        context.Process(target=run_replica, args=(rank, port, path, given, results, finished))
        for rank in range(REPLICAS)
    ]
    for process in replicas:
        process.start()
    try:
        found = {
            rank: (mine, alone) for rank, mine, alone in (results.get(timeout=DEADLINE) for _ in replicas)
        }
        for process in replicas:
            process.join(60)
        assert [process.exitcode for process in replicas] == [0] * REPLICAS
    finally:
        for process in replicas:
            process.terminate()
    expected = [result.tokens for result in references("qwen3-moe")]
    for rank in range(REPLICAS):
        assert found[rank][0] == expected[rank::REPLICAS]
    assert found[0][1] == expected[2]
