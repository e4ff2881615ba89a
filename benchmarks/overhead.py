"""Part c: what a decode step costs the host, on a virtual NPU in null mode (its compute does nothing).

Milliseconds are wall clock; ``cpu ms`` is the processor time of the engine's process per step, which other load
on the machine hardly moves, and the counts of device calls and waits are exact.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_process import Engine

DEVICE = "virtual:1:Ascend910B3,hbm=16GiB,null"
BATCHES = (1, 24, 32)


def measure(model: Path, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Median milliseconds and device calls per decode step for each batch size, eager and with graphs."""
    batches = (1, 24) if quick else BATCHES
    results: dict[str, Any] = {}
    for mode in ("eager", "graph"):
        settings = {
            "mode": "steps",
            "model": str(model),
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 512 << 20,
            "enforce_eager": mode == "eager",
        }
        environment = {
            "NPUFLEET_DEVICE": DEVICE,
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are driven from outside, one by one
        }
        with Engine(sys.executable, settings, environment) as engine:
            engine.ready()
            results[mode] = {
                str(size): engine.run(batch=size, steps=100 if quick else 200) for size in batches
            }
        say(f"{mode} done")
    return results


def table(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    lines = ["(c) host overhead per decode step, null mode, one thread"]
    lines.append(
        f"    {'mode':<7}{'batch':>6}{'ms median':>11}{'ms p90':>9}{'cpu ms':>9}{'device calls':>14}{'waits':>7}"
    )
    for mode, sizes in result.items():
        for size, found in sizes.items():
            lines.append(
                f"    {mode:<7}{size:>6}{found['ms']:>11.2f}{found['ms_p90']:>9.2f}{found['cpu_ms']:>9.2f}"
                f"{found['calls']:>14.0f}{found['waits']:>7.1f}"
            )
    most = json.dumps(result["eager"][max(result["eager"], key=int)]["most_called"])
    lines.append(f"    most called per eager step: {most}")
    return lines
