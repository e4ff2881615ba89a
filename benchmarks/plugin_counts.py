"""Counts of what the virtual NPU and its collectives did, per decoder layer and per decode step.

The functions that take a worker run where its NPU is: in this process or in a worker's.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from itertools import pairwise
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams

from npufleet.kernels.virtual import boot, counters

LAYER = re.compile(r"(^|\.)layers\.\d+$")
WARM = 12  # steps before counting: prefill, and what happens once


def _collectives() -> Counter[str]:
    """Bytes that this process has handed to each collective; ``calls:`` and its name counts them."""
    library = boot.runtime()
    library.vnpu_hccl_counter_name.restype = ctypes.c_char_p
    count = library.vnpu_hccl_counters(None, 0)
    values = (ctypes.c_uint64 * (3 * count))()
    library.vnpu_hccl_counters(values, count)
    found: Counter[str] = Counter()
    for index in range(count):
        name = library.vnpu_hccl_counter_name(index).decode()
        found[name], found[f"calls:{name}"] = values[3 * index + 1], values[3 * index]
    return found


def watch(worker: Any) -> None:
    """Note the counts before each decoder layer and behind the last."""
    layers = [
        module for name, module in worker.model_runner.get_model().named_modules() if LAYER.search(name)
    ]
    layers = [layer for layer in layers if type(layer).__name__ != "PPMissingLayer"]
    worker.marks = []

    def mark(*_: Any) -> None:
        worker.marks.append((Counter(counters.read().ops), _collectives()))

    for layer in layers:
        layer.register_forward_pre_hook(mark)
    layers[-1].register_forward_hook(mark)
    worker.layers = len(layers)


def reset(worker: Any) -> None:
    """Count from zero."""
    counters.reset()
    worker.marks = []
    worker.before = _collectives()


def collect(worker: Any, first: bool = False) -> dict[str, Any]:
    """Counts since :func:`reset`; those of layers, where watched, are of the latest or the first step."""
    seen = counters.read()
    after = _collectives()
    after.subtract(worker.before)
    layers, marks = [], getattr(worker, "marks", [])
    if marks:
        size = worker.layers + 1
        marks = marks[:size] if first else marks[-size:]
    for (ops, moved), (ops_after, moved_after) in pairwise(marks):
        layers.append({"ops": dict(ops_after - ops), "collectives": dict(moved_after - moved)})
    return {
        "ops": seen.ops,
        "waits": seen.syncs,
        "layers": layers,
        "collectives": {name: value for name, value in after.items() if value},
    }


def decode(llm: LLM, batch: int, steps: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Counts of ``steps`` decode steps of ``batch`` requests for each worker, and the tokens of each request."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=WARM + steps + 4, ignore_eos=True, detokenize=False)
    for index in range(batch):
        engine.add_request(str(index), {"prompt_token_ids": [5 + index, 6, 7, 8]}, params)
    for _ in range(WARM):
        engine.step()
    llm.collective_rpc(reset)
    for _ in range(steps):
        engine.step()
    found = llm.collective_rpc(collect)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return found, [tokens[name] for name in sorted(tokens)]
