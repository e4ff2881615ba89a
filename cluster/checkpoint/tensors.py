"""Whether a checkpoint's tensors are those that its model needs: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plan.model import ModelShape
from . import known, siblings
from .files import FLOATS, INDEX, WEIGHT_LEAVES, Stored

DESCRIPTION = "quant_model_description.json"
"""What ModelSlim writes beside the weights: the kind of each tensor."""
EIGHT_BITS = ("I8", "F8_E4M3", "F8_E5M2")
SCALES = ("weight_scale", "weight_scale_inv")
SHOWN = 3
_DESCRIBED = (".weight", ".weight_scale", ".weight_offset", ".input_scale", ".input_offset", ".deq_scale")


def check(
    source: Path, tensors: Mapping[str, Stored], config: Mapping[str, Any], shape: ModelShape | None
) -> list[str]:
    """Compare the tensors with the model.

    Args:
        source: the checkpoint's folder, for messages.
        tensors: what its weights hold.
        config: its ``config.json``.
        shape: the sizes of the model if its family is known, None if not.

    Returns what is odd but may be meant so.

    Raises:
        ValueError: naming the first tensors that are missing or cannot be right, and how to mend it.
    """
    _check_dtypes(source, tensors, _quantized(source, config))
    before = known.prefix(tensors)
    if shape is not None and before is not None:
        wanted = list(known.expected(shape, before, head=_has_head(config)))
        _report(source, [_name(entry) for entry in wanted if not _held(entry, tensors)], tensors)
        _check_shapes(source, tensors, wanted, config)
        _report(source, list(siblings.companions(tensors)), tensors)
        return []
    findings = siblings.findings(tensors)
    _report(source, [finding.name for finding in findings if finding.sure], tensors)
    return [finding.text for finding in findings]


def described(source: Path, tensors: Mapping[str, Stored], kinds: Mapping[str, Any]) -> None:
    """See that the weights hold what ModelSlim's description lists.

    Raises:
        ValueError: naming the first tensors that they lack.
    """
    missing = [name for name in kinds if name.endswith(_DESCRIBED) and name not in tensors]
    if missing and len(missing) < len(kinds):
        raise ValueError(f"{source} lacks {_some(missing)}, which {DESCRIPTION} lists; fetch it again")


def _quantized(source: Path, config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config")) or (source / DESCRIPTION).is_file()


def _has_head(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or ()
    return not config.get("tie_word_embeddings", False) and all("ForCausalLM" in str(name) for name in names)


def _name(entry: known.Expected) -> str:
    return f"{entry.module}.{entry.leaf}"


def _held(entry: known.Expected, tensors: Mapping[str, Stored]) -> bool:
    leaves = WEIGHT_LEAVES if entry.linear else (entry.leaf,)
    return any(f"{entry.module}.{leaf}" in tensors for leaf in leaves) or known.stacked(entry, tensors)


def _report(source: Path, missing: list[str], tensors: Mapping[str, Stored]) -> None:
    if not missing:
        return
    files = sorted({tensor.file for tensor in tensors.values()})
    place = files[0] if len(files) == 1 else f"none of its {len(files)} files ({files[0]} …)"
    lacks = f"lacks {_some(missing)}" if len(files) == 1 else f"holds {_some(missing)}"
    listed = f", and {INDEX} does not list it" if (source / INDEX).is_file() else ""
    raise ValueError(
        f"{source}: {place} {lacks}{listed}; the model cannot be whole without. Fetch the checkpoint again or "
        "convert it anew"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _check_shapes(
    source: Path, tensors: Mapping[str, Stored], wanted: list[known.Expected], config: Mapping[str, Any]
) -> None:
    bits = _packed_bits(config)
    for entry in wanted:
        for leaf in WEIGHT_LEAVES[:2] if entry.linear else (entry.leaf,):
            stored = tensors.get(f"{entry.module}.{leaf}")
            if stored is None or (leaf == "weight_packed" and bits is None):
                continue
            shape = known.packed_shape(entry.shape, bits or 0) if leaf == "weight_packed" else entry.shape
            if stored.shape != shape and not _padded(entry, stored):
                raise ValueError(
                    f"{source / stored.file}: {entry.module}.{leaf} has the shape {list(stored.shape)}, "
                    f"config.json asks for {list(shape)}; the two are not of one model"
                )


def _padded(entry: known.Expected, stored: Stored) -> bool:
    """Some checkpoints pad the vocabulary."""
    table = entry.module.endswith(("embed_tokens", "lm_head"))
    return table and stored.shape[1:] == entry.shape[1:] and stored.shape[0] > entry.shape[0]


def _packed_bits(config: Mapping[str, Any]) -> int | None:
    """Bits of a packed weight, if all groups have the same."""
    details = config.get("quantization_config")
    groups = details.get("config_groups") if isinstance(details, Mapping) else None
    if not isinstance(groups, Mapping):
        return None
    bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    found = bits.pop() if len(bits) == 1 else None
    return found if isinstance(found, int) else None


def _check_dtypes(source: Path, tensors: Mapping[str, Stored], quantized: bool) -> None:
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        scaled = any(f"{module}.{scale}" in tensors for scale in SCALES)
        where = f"{source / stored.file}: {name} is {stored.dtype}"
        if stored.dtype in EIGHT_BITS and not quantized:
            raise ValueError(
                f"{where}, but config.json has no quantization_config and there is no {DESCRIPTION}: the numbers "
                "would be taken as they are. Fetch the configuration that belongs to the weights"
            )
        if stored.dtype in EIGHT_BITS and not scaled:
            raise ValueError(f"{where} and has no {SCALES[0]} beside it; fetch it again or convert it anew")
        if stored.dtype in FLOATS and scaled:
            raise ValueError(
                f"{where}, but has a scale of a quantized weight beside it; fetch it again or convert it anew"
            )
        if stored.dtype not in (*FLOATS, *EIGHT_BITS):
            raise ValueError(
                f"{where}; weights are one of {', '.join((*FLOATS, *EIGHT_BITS))}. Convert it anew"
            )
