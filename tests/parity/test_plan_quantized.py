"""The memory plan of quantized checkpoints against the parameters that an engine keeps after loading them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from npufleet.cluster.plan.model import from_config
from npufleet.cluster.plan.quantization import MODELSLIM_FILE
from npufleet.cluster.plan.weights import Layout, derived, weights

from . import quantized
from .engines import engine
from .quantized import Quantized


def kept(path: Path) -> int:
    """Bytes of the parameters of an engine in this process."""
    with engine(path, dtype="bfloat16") as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        model = core.model_executor.driver_worker.worker.model_runner.model
        seen = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(seen.values())


def planned(path: Path) -> int:
    """Bytes of weights by the plan, with those that latent attention makes of them; tables are no parameters."""
    config = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"}
    file = path / MODELSLIM_FILE
    description = json.loads(file.read_text()) if file.is_file() else None
    shape = from_config(config, description=description)
    made = [part for part in derived(shape, Layout()) if part.name == "absorbed projections"]
    return sum(part.bytes for part in (*weights(shape, Layout()), *made))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("qwen2", quantized.write_w8a8_dynamic),
        ("qwen2", lambda source: quantized.write_w8a8_static(source, symmetric=False)),
        ("qwen2", lambda source: quantized.write_modelslim(source, static=True)),
        ("qwen2", lambda source: quantized.write_w4a16(source, group=32, symmetric=True)),
        ("qwen2", lambda source: quantized.write_w4a16(source, group=32, symmetric=False)),
        ("qwen3-moe", quantized.write_w8a8_dynamic),
        ("deepseek-v3-moe", quantized.write_w8a8_dynamic),
    ],
    ids=["w8a8", "w8a8-static", "modelslim", "w4a16", "w4a16-asymmetric", "experts", "latent"],
)
def test_the_plan_counts_what_an_engine_keeps(
    name: str, make: Callable[[Path], Quantized], checkpoint_path: Callable[[str], Path]
) -> None:
    path = make(checkpoint_path(name)).path
    assert kept(path) == pytest.approx(planned(path), rel=0.01)
