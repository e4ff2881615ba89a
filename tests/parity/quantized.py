"""Quantized checkpoints in their published layouts, and what transformers computes with the same numbers.

Each writer takes a plain checkpoint folder and writes two: the quantized one, for the engine, and one with the
dequantized weights in full precision, for transformers. Activations of the reference are quantized and dequantized
in PyTorch in front of every linear layer.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from .checkpoints import VOCAB
from .reference import load, prompts

Tensors = dict[str, torch.Tensor]
LINEAR = re.compile(
    r"\.(q|k|v|o|gate|up|down|q_a|q_b|kv_b|kv_a_proj_with_mqa|w1|w2|w3)(_proj|_proj_with_mqa)?\.weight$"
)
"""The weights that are quantized: not embeddings, norms, the output matrix and the experts' router."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized checkpoint and its dequantized twin."""

    path: Path
    twin: Path
    inputs: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Static activations: layer → scale and zero point; dynamic ones have none."""


def by_channel(weight: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and scales bf16 [out, 1] of a weight [out, in]."""
    top = 2 ** (bits - 1) - 1
    scale = (weight.abs().amax(1, keepdim=True) / top).bfloat16()
    return (weight / scale.float()).round().clamp(-top - 1, top).to(torch.int8), scale


def write(
    source: Path,
    name: str,
    quantize: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    config: dict[str, Any] | None,
    *,
    inputs: dict[str, tuple[float, int]] | None = None,
) -> Quantized:
    """Write the pair beside ``source``.

    :param quantize: weight name and values → the tensors of the quantized checkpoint, and the dequantized weight.
    :param config: ``quantization_config`` of config.json.
    """
    path, twin = source.parent / f"{source.name}-{name}", source.parent / f"{source.name}-{name}-twin"
    if not path.exists():
        shutil.copytree(source, path)
        shutil.copytree(source, twin)
        tensors: Tensors = {}
        plain: Tensors = {}
        for key, value in load_file(source / "model.safetensors").items():
            if LINEAR.search(key):
                made, plain[key] = quantize(key, value.float())
                tensors.update(made)
            else:
                tensors[key] = plain[key] = value
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
        save_file({k: v.contiguous() for k, v in plain.items()}, twin / "model.safetensors", {"format": "pt"})
        if config is not None:
            full = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**full, "quantization_config": config}))
    return Quantized(path=path, twin=twin, inputs=inputs or {})


def compressed_tensors(
    weights: dict[str, Any], activations: dict[str, Any] | None, layout: str
) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it."""
    common = {"type": "int", "dynamic": False, "symmetric": True, "num_bits": 8}
    group = {
        "targets": ["Linear"],
        "weights": {**common, **weights},
        "input_activations": None if activations is None else {**common, **activations},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
        "kv_cache_scheme": None,
    }


DYNAMIC = compressed_tensors({"strategy": "channel"}, {"strategy": "token", "dynamic": True}, "int-quantized")


def write_w8a8_dynamic(source: Path) -> Quantized:
    """llm-compressor's W8A8: weights by channel, activations by token at run time."""

    def quantize(key: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale = by_channel(value)
        return {key: values, f"{key}_scale": scale}, values * scale.float()

    return write(source, "w8a8", quantize, DYNAMIC)


@torch.inference_mode()
def calibrate(source: Path, *, symmetric: bool) -> dict[str, tuple[float, int]]:
    """Scale and zero point of what goes into each linear layer, over the standard prompts."""
    model, ranges = load(source), dict[str, tuple[float, float]]()

    def watch(name: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        def hook(_: Any, args: tuple[torch.Tensor]) -> None:
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = min(low, float(args[0].min())), max(high, float(args[0].max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and LINEAR.search(f".{name}.weight"):
            module.register_forward_pre_hook(watch(name))
    for prompt in prompts(VOCAB):
        model(torch.tensor([prompt]))
    if symmetric:
        return {name: (max(-low, high) / 127, 0) for name, (low, high) in ranges.items()}
    scales = {name: (high - low) / 255 for name, (low, high) in ranges.items()}
    return {name: (scales[name], round(-128 - low / scales[name])) for name, (low, _) in ranges.items()}


def write_w8a8_static(source: Path, *, symmetric: bool) -> Quantized:
    """W8A8 with one input scale for each layer from calibration, and a zero point unless symmetric."""
    inputs = calibrate(source, symmetric=symmetric)

    def quantize(key: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale = by_channel(value)
        layer = key.removesuffix(".weight")
        made = {key: values, f"{key}_scale": scale, f"{layer}.input_scale": torch.tensor([inputs[layer][0]])}
        if not symmetric:
            made[f"{layer}.input_zero_point"] = torch.tensor([inputs[layer][1]], dtype=torch.int8)
        return made, values * scale.float()

    activations = {"strategy": "tensor", "symmetric": symmetric}
    config = compressed_tensors({"strategy": "channel"}, activations, "int-quantized")
    name = "static" if symmetric else "static-zero"
    return write(source, name, quantize, config, inputs=inputs)


def fake_by_token(x: torch.Tensor) -> torch.Tensor:
    """x as int8 with one scale for each token holds it."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-20)
    return ((x.float() / scale).round().clamp(-128, 127) * scale).to(x.dtype)


def fake_static(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """x as int8 with a given scale and zero point holds it."""
    return (((x.float() / scale).round() + zero).clamp(-128, 127).sub(zero) * scale).to(x.dtype)


@contextmanager
def quantized_activations(
    model: PreTrainedModel, inputs: dict[str, tuple[float, int]] | None = None
) -> Iterator[None]:
    """Quantize and dequantize what goes into every linear layer but the output matrix and routers.

    :param inputs: scales and zero points by layer; without, by token.
    """
    handles = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not LINEAR.search(f".{name}.weight"):
            continue
        given = (inputs or {}).get(name)

        def hook(_: Any, args: tuple[torch.Tensor], given: tuple[float, int] | None = given) -> torch.Tensor:
            return fake_by_token(args[0]) if given is None else fake_static(args[0], *given)

        handles.append(module.register_forward_pre_hook(hook))
    assert handles
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
