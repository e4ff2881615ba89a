"""What only an engine's start can see of a model that cannot be served: one message, and no process is left.

What can be seen before is in tests/cluster/test_serve_refusals.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from .fleet import START_S, Fleet, eventually, gone
from .models import checkpoint, flags

pytestmark = pytest.mark.slow
LAST = "model.layers.3.self_attn.o_proj.weight"  # the last layer, of a family that is not known by name


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})
    return folder


def without_last(folder: Path) -> Path:
    return edit(checkpoint("gemma3", folder), lambda tensors: tensors.pop(LAST))


def with_another_shape(folder: Path) -> Path:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for number in range(4):  # all alike, so that no layer is odd
            name = f"model.layers.{number}.self_attn.o_proj.weight"
            tensors[name] = tensors[name][:, :-8]

    return edit(checkpoint("gemma3", folder), change)


def plain(folder: Path) -> Path:
    return checkpoint("qwen3-moe", folder)


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "a tensor that nobody knew of": (
        without_last,
        {},
        r"the checkpoint gave no values for .*layers\.3\.self_attn\.o_proj\.weight; fetch it again",
    ),
    "a shape that nobody knew of": (
        with_another_shape,
        {},
        r"the tensor .*self_attn\.o_proj\.weight \[128, 120\] float32 of the checkpoint does not fit the model",
    ),
    "a cache that does not fit": (
        plain,
        {"num_gpu_blocks_override": 100_000},
        r"out of NPU memory: raise tensor_parallel_size, or lower max_num_batched_tokens, .* kv_cache",
    ),
    "ranks that do not start": (
        plain,
        {"data_parallel_size": 2, "num_gpu_blocks_override": 100_000},
        r"out of NPU memory: raise tensor_parallel_size, or lower max_num_batched_tokens, .* kv_cache",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_start_that_cannot_succeed_says_why_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, settings, said = CASES[case]
    (tmp_path / "models").mkdir()
    path = make(tmp_path / "models")
    device = "virtual:2:Ascend910B3,hbm=512MiB"
    fleet = Fleet(log=tmp_path / "log", target=str(path), arguments=flags(**settings), device=device)
    seen: set[psutil.Process] = set()
    try:
        fleet.launch()
        assert fleet.process is not None

        def over() -> bool:
            assert fleet.process is not None
            seen.update(fleet.processes() if fleet.process.poll() is None else [])
            return fleet.process.poll() is not None

        eventually("the command has given up", START_S, over)
        assert fleet.process.returncode == 1, fleet.said()
    finally:
        fleet.kill()
    text = fleet.said()
    assert text.count("npufleet: the fleet did not come up") == 1, text
    assert len(re.findall(f"^model {path.name!r}: .*{said}", text, re.MULTILINE)) == 1, text
    assert "Traceback" not in text and "had to kill" not in text, text
    assert [process.pid for process in seen if not gone(process)] == []
