"""Weights that a checkpoint does not have are missed when it is loaded, whatever kind of layer they are of."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.config.load import LoadConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader import get_model_loader

from npufleet.plugin.loader import CheckedLoader, checked, is_marked, mark

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (8, 6), (3, 8, 6)], ids=str)
def test_what_was_not_written_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.empty(shape, dtype=dtype)
    mark(weight)
    assert is_marked(weight)
    rows = weight.view(-1, shape[-1])
    rows[:-1] = torch.ones(rows[:-1].shape).to(dtype)
    assert is_marked(weight), "the last row was not written"
    mark(weight)
    if len(shape) > 1:
        weight[..., :-1] = torch.ones(weight[..., :-1].shape).to(dtype)
        assert is_marked(weight), "the last column was not written"
    weight.copy_(torch.ones(shape).to(dtype))
    assert not is_marked(weight)


def test_an_integer_weight_may_hold_the_smallest_integer() -> None:
    weight = torch.ones(4, 4, dtype=torch.int8)
    weight.fill_diagonal_(-128)
    assert not is_marked(weight)


def test_large_weights_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npufleet.plugin.loader._CHUNK", 8)
    weight = torch.ones(10, 4)
    assert not is_marked(weight)
    weight[9, 3] = float("nan")
    assert is_marked(weight)


def test_the_users_format_is_kept() -> None:
    loader = get_model_loader(checked(LoadConfig(load_format="safetensors")))
    assert type(loader) is CheckedLoader
    assert loader.load_config.load_format == "safetensors"
    again = checked(checked(LoadConfig()))
    assert again.load_format == "npu-auto"
    assert checked(LoadConfig(load_format="dummy")).load_format == "dummy"
    extra = {"enable_weights_track": False}
    assert checked(LoadConfig(model_loader_extra_config=extra)).load_format == "auto"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that fails in this process leaves its groups to the next one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    cleanup_dist_env_and_memory()


def without(source: Path, folder: Path, lost: str) -> Path:
    """A copy of the checkpoint that lacks one tensor."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "lost", "said"),
    [
        (
            "llama",
            "model.layers.1.self_attn.k_proj.weight",
            r"layers\.1\.self_attn\.qkv_proj\.weight \(k_proj\)",
        ),
        pytest.param("llama", "lm_head.weight", r"lm_head\.weight", marks=pytest.mark.slow),
        ("mixture", "model.layers.0.mlp.experts.2.up_proj.weight", r"layers\.0\.mlp\.experts\..*w13_weight"),
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    kind: str,
    lost: str,
    said: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    alone: None,
) -> None:
    broken = without(checkpoint(kind, weights=True), tmp_path / "broken", lost)
    with pytest.raises(ValueError, match=f"the checkpoint gave no values for .*{said}"):
        start(broken)


def test_a_tensor_of_another_shape_is_named(
    checkpoint: Callable[..., Path], tmp_path: Path, alone: None
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint("llama", weights=True), folder)
    tensors = load_file(folder / "model.safetensors")
    wrong = "model.layers.1.self_attn.o_proj.weight"
    tensors[wrong] = tensors[wrong][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"the tensor {wrong} \[128, 127\] float32 of the checkpoint does not"
    ):
        start(folder)


def test_a_quantized_checkpoint_that_lacks_a_tensor_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, alone: None
) -> None:
    folder = tmp_path / "int8"
    shutil.copytree(checkpoint("llama", weights=True), folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = value.abs().amax(1, keepdim=True) / 127
            tensors[name] = (value / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.bfloat16()
        else:
            tensors[name] = value
    lost = "model.layers.1.mlp.down_proj.weight"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"the checkpoint gave no values for {lost}"):
        start(folder, dtype="bfloat16")


def start(path: Path, dtype: str = "float32") -> LLM:
    return LLM(
        model=str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=128,
        gpu_memory_utilization=0.05,
        enforce_eager=True,
    )
