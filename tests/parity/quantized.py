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
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .checkpoints import VOCAB
from .reference import load, prompts

Tensors = dict[str, torch.Tensor]
LINEAR = re.compile(r"\.((q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|w[123])\.weight$")
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


def write_modelslim(source: Path, *, static: bool) -> Quantized:
    """ModelSlim's W8A8 (``static``) or W8A8_DYNAMIC; config.json stays as it was."""
    inputs = calibrate(source, symmetric=False) if static else {}
    plain = load_file(source / "model.safetensors")
    kinds = dict.fromkeys(plain, "FLOAT")

    def quantize(key: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scale = by_channel(value)
        scale, layer = scale.float(), key.removesuffix(".weight")
        made = {key: values, f"{key}_scale": scale, f"{key}_offset": torch.zeros_like(scale)}
        if static:
            input_scale, zero = inputs[layer]
            deq = input_scale * scale.flatten()
            bias = plain.get(f"{layer}.bias", torch.zeros(len(deq)))
            made |= {
                f"{layer}.input_scale": torch.tensor([input_scale]),
                f"{layer}.input_offset": torch.tensor([float(zero)]),
                f"{layer}.deq_scale": deq,
                f"{layer}.quant_bias": ((bias / deq).round() - zero * values.float().sum(1)).int(),
            }
        kinds.update(dict.fromkeys(made, "W8A8" if static else "W8A8_DYNAMIC"))
        return made, values * scale

    made = write(source, "slim-static" if static else "slim-dynamic", quantize, None, inputs=inputs)
    description = made.path / "quant_model_description.json"
    if not description.exists():
        whole = {"model_quant_type": "W8A8" if static else "W8A8_DYNAMIC", "version": "1.0.0", **kinds}
        description.write_text(json.dumps(whole))
    return made


def write_w4a16(source: Path, *, group: int, symmetric: bool) -> Quantized:
    """llm-compressor's W4A16: eight 4-bit values in an int32 along the inputs, with scales by group (0: by channel)."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    def quantize(key: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grouped = value.view(value.shape[0], -1, group or value.shape[1])
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15).bfloat16()
        wide = scale.float().unsqueeze(-1)
        zero = torch.zeros_like(wide) if symmetric else (-8 - low.unsqueeze(-1) / wide).round().clamp(-8, 7)
        values = ((grouped / wide).round() + zero).clamp(-8, 7)
        layer = key.removesuffix(".weight")
        made = {
            f"{layer}.weight_packed": pack_to_int32(values.flatten(1).to(torch.int8), 4),
            f"{layer}.weight_scale": scale,
            f"{layer}.weight_shape": torch.tensor(value.shape),
        }
        if not symmetric:
            points = zero.squeeze(-1).to(torch.int8)
            made[f"{layer}.weight_zero_point"] = pack_to_int32(points, 4, packed_dim=0)
        return made, ((values - zero) * wide).flatten(1)

    weights = {"num_bits": 4, "symmetric": symmetric, "strategy": "group" if group else "channel"}
    config = compressed_tensors({**weights, "group_size": group or None}, None, "pack-quantized")
    return write(source, f"w4a16-{group}-{symmetric}", quantize, config)


def write_fp8_block(source: Path) -> Quantized:
    """DeepSeek V3's layout: FP8 weights, ``weight_scale_inv`` for each block of 128 × 128."""

    def quantize(key: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = (-(-size // 128) for size in value.shape)
        padded = torch.nn.functional.pad(
            value, (0, columns * 128 - value.shape[1], 0, rows * 128 - value.shape[0])
        )
        scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
        values = (value / full).to(torch.float8_e4m3fn)
        return {key: values, f"{key}_scale_inv": scale}, values.float() * full

    routers = [
        key.removesuffix(".weight") for key in load_file(source / "model.safetensors") if ".mlp.gate." in key
    ]
    config = {
        "quant_method": "fp8",
        "modules_to_not_convert": routers,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return write(source, "fp8", quantize, config)


def fake_by_token(x: torch.Tensor) -> torch.Tensor:
    """x as int8 with one scale for each token holds it."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-20)
    return ((x.float() / scale).round().clamp(-128, 127) * scale).to(x.dtype)


def fake_static(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """x as int8 with a given scale and zero point holds it."""
    return (((x.float() / scale).round() + zero).clamp(-128, 127).sub(zero) * scale).to(x.dtype)


class _Activations(TorchFunctionMode):
    """Quantizes and dequantizes what goes into the products whose weights are quantized."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, tuple[float, int]]) -> None:
        super().__init__()
        self.inputs = inputs
        self.seen = set[str]()
        self.names = {
            parameter.untyped_storage().data_ptr(): name.removesuffix(".weight")
            for name, parameter in model.named_parameters()
            if LINEAR.search(f".{name}") or name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            name = self.names.get(args[1].untyped_storage().data_ptr())
            if name is not None:
                self.seen.add(name)
                given = self.inputs.get(name)
                x = fake_by_token(args[0]) if given is None else fake_static(args[0], *given)
                args = (x, *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def quantized_activations(
    model: PreTrainedModel, inputs: dict[str, tuple[float, int]] | None = None
) -> Iterator[None]:
    """Quantize and dequantize what goes into every quantized layer, experts too.

    :param inputs: scales and zero points by layer; without, by token.
    """
    if any(".experts." in name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # one product for each expert, which the mode sees
    with _Activations(model, inputs or {}) as mode:
        yield
    missed = set(mode.names.values()) - mode.seen
    assert not missed, f"transformers computed some products in another way: {missed}"
