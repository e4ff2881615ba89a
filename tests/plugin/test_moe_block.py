"""The experts' block of models that the loader has loaded, without an engine, against transformers' own class."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

from npufleet.plugin import register_layers
from tests.parity.checkpoints import BY_NAME, GATED_CHECKPOINT, write
from tests.parity.reference import load

TOKENS, LAYER = 9, 2
FACTOR = 1.5  # as of engines in tests/parity
MODELS = ("glm4-moe", GATED_CHECKPOINT.name)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    register_layers()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/ranks", 0, "hccl")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def block_output(path: Path, x: torch.Tensor, dtype: str, **options: Any) -> torch.Tensor:
    """What the plugin's block makes of x [tokens, hidden], float32."""
    config = EngineArgs(
        model=str(path), skip_tokenizer_init=True, max_model_len=64, dtype=dtype, additional_config=options
    ).create_engine_config()
    with set_current_vllm_config(config):
        block = get_model(vllm_config=config).model.layers[LAYER].mlp
        with torch.inference_mode(), set_forward_context({}, config, num_tokens=len(x)):
            return block(x.to("npu", getattr(torch, dtype))).float().cpu()


@torch.inference_mode()
def truth(path: Path, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What transformers' block makes of it, float32."""
    out = load(path, dtype=dtype).model.layers[LAYER].mlp(x.to(dtype)[None])
    return (out[0] if isinstance(out, tuple) else out)[0].float()


QUICK = (("glm4-moe", "float16", False), (GATED_CHECKPOINT.name, "float32", True))


@pytest.mark.parametrize(
    ("name", "dtype", "overlap"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in product(MODELS, ("float32", "float16", "bfloat16"), (False, True))
    ],
)
def test_routed_and_shared_experts(name: str, dtype: str, overlap: bool, folder: Path, group: None) -> None:
    """GLM's routed experts have a factor, Qwen2's shared one has a gate."""
    path = write(BY_NAME[name], folder)
    x = torch.randn(TOKENS, 128, generator=torch.Generator().manual_seed(6)).to(getattr(torch, dtype)).float()
    exact = truth(path, x, torch.float32)
    ours = (block_output(path, x, dtype, shared_experts_overlap=overlap) - exact).abs()
    if dtype == "float32":
        assert ours.max() < 1e-5 * exact.abs().max()
        return
    theirs = (truth(path, x, getattr(torch, dtype)) - exact).abs()
    assert ours.mean() < FACTOR * theirs.mean() and ours.max() < 2 * FACTOR * theirs.max()
