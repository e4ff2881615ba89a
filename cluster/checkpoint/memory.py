"""Whether a model can lie in an NPU's memory at all: what is known before one is opened.

Only what is certain counts, weights and a KV cache of a given size; `npufleet plan memory` counts everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plan.memory import GIB, kinds_of_ranks
from ..plan.model import DENSE, LATENT, MOE, ModelShape, from_config
from ..plan.quantization import MODELSLIM_FILE
from ..plan.shared import of_engine
from ..plan.weights import Layout, derived, weights
from .files import WEIGHTS, read_json


def check(model: str, source: Path, engine: Mapping[str, Any], memory: int) -> None:
    """See that weights and cache fit into ``memory`` bytes for each NPU.

    Raises:
        ValueError: naming what does not fit and what would.
    """
    sizes = {name: int(engine.get(f"{name}_parallel_size") or 1) for name in ("tensor", "data", "pipeline")}
    held = _weights(source, engine, sizes)
    cache = int(engine.get("kv_cache_memory_bytes") or 0)
    if held + cache <= memory:
        return
    what = f"the weights take {_gib(held)} on each NPU"
    remedy = "raise tensor_parallel_size, or use quantized weights"
    if held <= memory:
        what += f" and the KV cache {_gib(cache)} (kv_cache_memory_bytes)"
        remedy = f"lower kv_cache_memory_bytes below {memory - held:,}, or raise tensor_parallel_size"
    raise ValueError(f"model {model!r}: out of memory: {what}, which has {_gib(memory)}; {remedy}")


def _weights(source: Path, engine: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Bytes of weights on a rank: exact for the known families, else no less than the files' share."""
    shape = _shape(source, engine)
    if shape is not None:
        expert_parallel = bool(engine.get("enable_expert_parallel", False))
        shared = of_engine(engine, "additional_config")
        layout = Layout(
            tensor=sizes["tensor"],
            data=sizes["data"],
            pipeline=sizes["pipeline"],
            expert_parallel=expert_parallel,
            shared=shared,
        )
        return max(
            sum(part.bytes for part in (*weights(shape, rank), *derived(shape, rank)))
            for rank in kinds_of_ranks(layout)
        )
    files = sum(path.stat().st_size for path in source.iterdir() if path.suffix in WEIGHTS)
    return files // (sizes["tensor"] * sizes["data"] * sizes["pipeline"])


def _shape(source: Path, engine: Mapping[str, Any]) -> ModelShape | None:
    config = read_json(source / "config.json")
    if config.get("model_type") not in (*DENSE, *MOE, *LATENT) or engine.get("hf_overrides"):
        return None
    if engine.get("dtype", "auto") != "auto":
        config = {**config, "dtype": engine["dtype"]}
    file = source / MODELSLIM_FILE
    try:
        return from_config(config, str(source / "config.json"), read_json(file) if file.is_file() else None)
    except ValueError:  # a format that is not counted here; the engine says what it thinks of it
        return None


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
