"""Host time per decode step on virtual NPUs in null mode (their compute does nothing), and where it goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .engine_process import Engine

DEVICE = "virtual:1:Ascend910B3,hbm=16GiB,null"
BATCHES = (1, 32, 128)
PARTS = {
    "scheduler": ("vllm/v1/core/", "vllm/v1/request", "vllm/v1/kv_cache"),
    "engine loop, outputs": (
        "vllm/v1/engine/",
        "vllm/v1/outputs",
        "vllm/v1/executor/",
        "vllm/v1/serial",
        "vllm/outputs",
    ),
    "batch and inputs": (
        "vllm/v1/worker/",
        "vllm/v1/utils",
        "vllm/utils",
        "plugin/model_runner",
        "plugin/worker",
    ),
    "attention metadata": ("vllm/v1/attention/", "plugin/attention/"),
    "graph replay": ("plugin/graph", "vllm/forward_context", "torch_npu/npu/graphs"),
    "layers": ("vllm/model_executor/", "plugin/layers/", "plugin/moe/"),
    "device operations": ("kernels/ops/", "kernels/reference/", "torch/_ops"),
    "sampling": ("vllm/v1/sample/", "plugin/sampler"),
    "torch modules": ("torch/",),
}
"""Part of a step → the files that belong to it by a part of their path; the first that fits counts."""


def part_of(file: str) -> str:
    """The part of a step that a file belongs to."""
    return next((part for part, paths in PARTS.items() if any(path in file for path in paths)), "other")


def shares(profile: dict[str, float]) -> dict[str, float]:
    """Per cent of the profiled time by part, the largest first."""
    parts: dict[str, float] = {}
    for file, seconds in profile.items():
        parts[part_of(file)] = parts.get(part_of(file), 0.0) + seconds
    total = sum(parts.values())
    return {part: 100 * parts[part] / total for part in sorted(parts, key=lambda part: -parts[part])}


def measure(model: Path, quick: bool) -> dict[str, dict[int, dict[str, Any]]]:
    """Measurements of each batch size, eager and with graphs; each engine is a process of its own."""
    steps, results = (50 if quick else 200), {}
    for mode in ("eager", "graph"):
        settings = {
            "mode": "steps",
            "model": str(model),
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": max(BATCHES),
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": mode == "eager",
            "compilation_config": {"cudagraph_capture_sizes": list(BATCHES)},
        }
        environment = {
            "NPUFLEET_DEVICE": DEVICE,
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are driven from outside, one by one
        }
        with Engine(sys.executable, settings, environment) as engine:
            engine.ready()
            results[mode] = {size: engine.run(batch=size, steps=steps, profile=steps) for size in BATCHES}
    return results


def table(results: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Times, counts and the profile."""
    lines = [
        "Host time of a decode step in null mode, one thread",
        "",
        "| mode | batch | ms | CPU ms | device calls | waits | of these |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, sizes in results.items():
        for size, found in sizes.items():
            kinds = ", ".join(
                f"{kind} {count:.1f}" for kind, count in found["waits_by_kind"].items() if count
            )
            lines.append(
                f"| {mode} | {size} | {found['ms']:.2f} | {found['cpu_ms']:.2f} | {found['calls']:.0f} "
                f"| {found['waits']:.1f} | {kinds} |"
            )
    parts = [*PARTS, "other"]
    profiles = {
        (mode, size): shares(found["profile"])
        for mode, sizes in results.items()
        for size, found in sizes.items()
    }
    lines += [
        "",
        "Per cent of the profiled time (the profiler makes Python dearer than it is)",
        "",
        "| part | " + " | ".join(f"{mode} {size}" for mode, size in profiles) + " |",
        "|---" * (1 + len(profiles)) + "|",
    ]
    lines += [
        f"| {part} | " + " | ".join(f"{profile.get(part, 0.0):.0f}" for profile in profiles.values()) + " |"
        for part in parts
    ]
    return lines
