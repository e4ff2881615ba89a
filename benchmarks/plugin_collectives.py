"""Bytes that ranks hand to collectives per decoder layer, against the formula."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import forks

DEADLINE = 300.0
RANKS, BATCH, PROMPT = 2, 8, 64
SPREAD = {"enable_expert_parallel": True}
MC2 = SPREAD | {"additional_config": {"moe_communication": "mc2"}}
AGREEMENT, MARKS, SCALE = 8 * 8, 12, 4
"""Bytes of a dispatch: what ranks tell each other of their call beside the counts; what travels with a row beside it:
where it comes from, and its scale if it is int8.
"""
WIDE = 1024  # the smallest hidden size that the fused operators take on A3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas are made of: tokens of a rank, bytes of a row, choices per token, experts."""

    tokens: int
    row: int
    choices: int
    experts: int


def expected(way: str, at: Sizes) -> dict[str, int]:
    """Bytes that both ranks together hand in for the last layer.

    Every way sums the attention's output over the ranks that split it, none here between replicas. What a rank
    receives follows from what is handed in: of an all-gather the other ranks' parts, of a reduce-scatter and an
    all-to-all all but the rank's own part.
    """
    rows = RANKS * at.tokens * at.row
    if way.endswith("MC2") or way.endswith("int8"):
        return _fused(way, at)
    if way in ("TP2", "EP2"):  # behind the attention and behind the experts or the dense block
        return {"HcclAllReduce": 2 * rows}
    if way == "DP2, all-gather":
        return {"HcclAllGather": rows + RANKS * at.tokens * 8 * at.choices, "HcclReduceScatter": RANKS * rows}
    counts = RANKS * 8 * at.experts
    return {"HcclAlltoAll": counts, "HcclAlltoAllV": 2 * at.choices * rows}


def _fused(way: str, at: Sizes) -> dict[str, int]:
    """As :func:`expected` for MC2. Ranks that share tokens divide them, and gather the results."""
    divided = way.startswith("EP2")
    rows = (1 if divided else RANKS) * at.tokens * at.choices
    sent = at.row // 2 + SCALE if way.endswith("int8") else at.row
    found = {
        "MoeDistributeDispatch counts": RANKS * (RANKS * AGREEMENT + 8 * at.experts),
        "MoeDistributeDispatch": rows * (sent + MARKS),
        "MoeDistributeCombine": rows * at.row,
    }
    around = {"HcclAllReduce": RANKS * at.tokens * at.row, "HcclAllGather": at.tokens * at.row}
    return found | (around if divided else {})


def shared(path: Path, settings: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """A decode step of two ranks of one engine."""
    from tests.parity.engines import worker_engine

    from . import plugin_counts

    with worker_engine(path, RANKS, dtype="bfloat16", **settings) as llm:
        llm.collective_rpc(plugin_counts.watch)
        yield plugin_counts.decode(llm, BATCH, 4)[0]


def replica(
    rank: int, port: int, path: Path, prefill: bool, settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One of two replicas: a decode step, or the prefill of one prompt."""
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(RANKS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
    )
    from tests.parity.checkpoints import VOCAB
    from tests.parity.engines import engine, greedy
    from tests.parity.reference import prompts

    from . import plugin_counts

    with engine(path, dtype="bfloat16", **settings) as llm:
        llm.collective_rpc(plugin_counts.watch)
        if prefill:
            greedy(llm, prompts(VOCAB, lengths=(5,)), 2)
            llm.collective_rpc(plugin_counts.reset)
            greedy(llm, prompts(VOCAB, lengths=(PROMPT,)), 1)
            yield llm.collective_rpc(plugin_counts.collect, args=(True,))[0]
        else:
            yield plugin_counts.decode(llm, BATCH, 4)[0][0]


def _replicas(path: Path, folder: Path, prefill: bool = False, **settings: Any) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def one(rank: int) -> dict[str, Any]:
        (found,) = forks.answers(
            partial(replica, rank, port, path, prefill, SPREAD | settings), folder / f"log{rank}", DEADLINE
        )
        return found

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def table(folder: Path) -> tuple[list[str], bool]:
    """The table, with what was counted and what the formula says, and whether they are equal."""
    from tests.parity.checkpoints import BY_NAME, write
    from tests.parity.quantized import write_w8a8_dynamic

    plain = BY_NAME["qwen3-moe"]
    wide = replace(plain, name="qwen3-moe-wide", config={**plain.config, "hidden_size": WIDE})
    models = {**BY_NAME, wide.name: wide}

    def path(name: str) -> Path:
        return write(models[name], folder)

    def engines(name: str, **settings: Any) -> list[dict[str, Any]]:
        (found,) = forks.answers(partial(shared, path(name), settings), folder / "log", DEADLINE)
        return found

    runs = {
        ("TP2", "llama-tp"): lambda: engines("llama-tp"),
        ("EP2", "qwen3-moe"): lambda: engines("qwen3-moe", **SPREAD),
        ("DP2, all-gather", "qwen3-moe"): lambda: _replicas(path("qwen3-moe"), folder),
        ("EP2, MC2", wide.name): lambda: engines(wide.name, **MC2),
        ("DP2, MC2", wide.name): lambda: _replicas(path(wide.name), folder, **MC2),
        ("DP2, MC2, int8", wide.name): lambda: _replicas(
            write_w8a8_dynamic(path(wide.name)).path, folder, **MC2
        ),
        ("DP2, all-to-all", "mixtral-top-1"): lambda: _replicas(path("mixtral-top-1"), folder, True),
    }
    lines = [
        "Bytes that two ranks together hand to collectives in the last layer (bfloat16)",
        "",
        "| way | model | tokens of a rank | collective | calls of a rank | bytes | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    good = True
    for (way, name), run in runs.items():
        config = models[name].full_config()
        at = Sizes(
            tokens=PROMPT if way == "DP2, all-to-all" else BATCH,
            row=2 * config["hidden_size"],
            choices=config.get("num_experts_per_tok", 0),
            experts=config.get("num_experts", config.get("num_local_experts", 0)),
        )
        found: Counter[str] = Counter()
        for rank in run():
            found.update(rank["layers"][-1]["collectives"])
        formula = expected(way, at)
        for collective in sorted({c for c in found if not c.startswith("calls:")} | set(formula)):
            good = good and found[collective] == formula.get(collective, 0)
            calls = found[f"calls:{collective}"] // RANKS
            lines.append(
                f"| {way} | {name} | {at.tokens} | {collective} | {calls} | {found[collective]} "
                f"| {formula.get(collective, 0)} |"
            )
    return lines, good
