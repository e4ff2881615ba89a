"""How the weights of a quantized checkpoint are kept on an NPU, read from its configuration.

Compressed-tensors names groups of layers in ``quantization_config``; ModelSlim writes the kind of every tensor into a
file beside the weights. What is counted is the form after loading (``plugin/quantization``), not the file's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODELSLIM_FILE = "quant_model_description.json"
FLOAT_KIND = "FLOAT"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The form of one linear layer's weight."""

    name: str
    bits: int
    channel: int
    """Bytes that an output channel takes beside its weights in a linear layer: scales and constants."""
    group: int = 0
    """Inputs that share a scale in the model's dtype; 0: one float32 scale for a channel, counted in ``channel``."""
    zero_points: bool = False
    quantizes_inputs: bool = True

    def bytes(self, rows: int, columns: int, size: int, *, count: int = 1, expert: bool = False) -> int:
        """Bytes of ``count`` matrices [rows, columns] with their scales.

        Args:
            rows: output channels.
            columns: inputs.
            size: bytes of an element of the model's dtype.
            count: how many.
            expert: experts have one scale for each channel, in the model's dtype if that is bfloat16.
        """
        packed = rows * columns * self.bits // 8
        if self.group:
            groups = -(-columns // self.group)
            return count * (packed + rows * groups * size * (2 if self.zero_points else 1))
        return count * (packed + rows * (size if expert else self.channel))


INT8_DYNAMIC = Scheme(name="W8A8 dynamic", bits=8, channel=4)
INT8_STATIC = Scheme(name="W8A8 static", bits=8, channel=12)
"""The weight's scale, its product with the input's, and the constant of the zero point: 4 bytes each."""
MODELSLIM: Mapping[str, Scheme | None] = {
    FLOAT_KIND: None,
    "W8A8": INT8_STATIC,
    "W8A8_DYNAMIC": INT8_DYNAMIC,
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which layers of a model are quantized, and how."""

    format: str
    groups: tuple[tuple[str, Scheme], ...] = ()
    """Name or pattern of layers, as compressed-tensors writes it, and their scheme; the first that fits counts."""
    ignored: tuple[str, ...] = ()
    kinds: Mapping[str, str] | None = None
    """ModelSlim: tensor name → kind."""

    @property
    def quantizes_inputs(self) -> bool:
        """Whether any layer makes 8-bit copies of its inputs."""
        schemes = [scheme for _, scheme in self.groups]
        schemes += [scheme for kind in set((self.kinds or {}).values()) if (scheme := MODELSLIM[kind])]
        return any(scheme.quantizes_inputs for scheme in schemes)

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer by its name in the checkpoint, None if it is not quantized."""
        if self.kinds is not None:
            return MODELSLIM[self.kinds.get(f"{module}.weight", FLOAT_KIND)]
        if any(_fits(pattern, module) for pattern in self.ignored):
            return None
        return next((s for pattern, s in self.groups if pattern == "Linear" or _fits(pattern, module)), None)


def _fits(pattern: str, module: str) -> bool:
    """``re:…`` is a regular expression from the start of the name; anything else a name, or the end of one."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def read(
    config: Mapping[str, Any], description: Mapping[str, Any] | None, where: str = "config.json"
) -> Quantization | None:
    """Return how a checkpoint is quantized; None if its weights are kept in the model's dtype.

    Blocks of 8-bit floating point become that when they are loaded (``plugin/quantization/fp8_block.py``).

    Args:
        config: ``config.json``.
        description: ModelSlim's file beside it, if there is one.
        where: what errors call the configuration.

    Raises:
        ValueError: for a format that is not served on NPUs.
    """
    if description is not None:
        return _modelslim(description)
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    details = found if isinstance(found, Mapping) else {"quant_method": found}
    method = details.get("quant_method")
    if method == "fp8" and details.get("weight_block_size"):
        return None
    if method == "compressed-tensors":
        return _compressed(details, where)
    raise ValueError(
        f"{where}: its weights are quantized ({method}); the plan knows compressed-tensors W8A8 and W4A16, "
        f"ModelSlim's W8A8 (with {MODELSLIM_FILE} beside config.json), and blocks of 8-bit floating point, which are "
        "served as bfloat16. Remove quantization_config from a copy of the file to plan for unquantized weights"
    )


def _modelslim(description: Mapping[str, Any]) -> Quantization:
    kinds = {name: str(kind) for name, kind in description.items() if name.endswith(".weight")}
    unknown = sorted(set(kinds.values()) - set(MODELSLIM))
    if unknown:
        raise ValueError(
            f"{MODELSLIM_FILE} has weights of the kinds {', '.join(unknown)}; known are {', '.join(MODELSLIM)}"
        )
    return Quantization(format="ModelSlim", kinds=kinds)


def _compressed(details: Mapping[str, Any], where: str) -> Quantization:
    groups: list[tuple[str, Scheme]] = []
    given = details.get("config_groups")
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{where}: quantization_config has no config_groups")
    for name, group in given.items():
        scheme = _scheme(group, f"{where}: quantization_config.config_groups.{name}")
        groups += [(str(target), scheme) for target in group.get("targets") or ()]
    return Quantization(
        format="compressed-tensors",
        groups=tuple(groups),
        ignored=tuple(str(pattern) for pattern in details.get("ignore") or ()),
    )


def _scheme(group: Any, where: str) -> Scheme:
    weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
    inputs = group.get("input_activations") if isinstance(group, Mapping) else None
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if kind == "int" and bits == 8 and inputs and inputs.get("num_bits") == 8:
        return INT8_DYNAMIC if inputs.get("dynamic") else INT8_STATIC
    if kind == "int" and bits == 4 and not inputs:
        grouped = weights.get("strategy") == "group"
        return Scheme(
            name="W4A16",
            bits=4,
            channel=2,
            group=int(weights.get("group_size") or 0) if grouped else 0,
            zero_points=not weights.get("symmetric", True),
            quantizes_inputs=False,
        )
    raise ValueError(
        f"{where}: weights of {bits} bits ({kind}) with "
        f"{'unquantized' if not inputs else str(inputs.get('num_bits')) + '-bit'} inputs are not served on NPU; "
        "W8A8 (int) and W4A16 are"
    )
