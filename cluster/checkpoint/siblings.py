"""What a layer lacks that the layers like it have: for models whose tensors are not known by name.

vLLM leaves a linear layer whose weight is missing as the memory was: it serves, and answers nonsense.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .files import FLOATS, WEIGHT_LEAVES, Shape, Stored

LAYER = re.compile(r"(?P<stem>(?:.*\.)?(?:layers|h|blocks))\.(?P<number>\d+)\.(?P<rest>.+)")
_COMPANION = re.compile(
    r"\.((weight|input|output|[qkv])_(scale|scale_inv|offset|zero_point|shape|g_idx)|"
    r"quant_bias|deq_scale|scales|qzeros|g_idx)$"
)
"""What a quantized weight has beside it."""
_PACKED = re.compile(r"\.(weight_packed|qweight)$")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something odd about the tensor ``name``. ``sure``: it is wrong, not only unusual."""

    name: str
    text: str
    sure: bool


def stacks(tensors: Mapping[str, Stored]) -> dict[str, dict[int, dict[str, Stored]]]:
    """Return the tensors of layers: stack (``model.layers``) → layer → the rest of the name → tensor."""
    found: dict[str, dict[int, dict[str, Stored]]] = {}
    for name, tensor in tensors.items():
        if match := LAYER.fullmatch(name):
            found.setdefault(match["stem"], {}).setdefault(int(match["number"]), {})[match["rest"]] = tensor
    return found


def findings(tensors: Mapping[str, Stored]) -> list[Finding]:
    """Return where one layer lacks what at least two layers have that are otherwise like it, or alone has a
    tensor in another shape.

    The first and the last layer of some models are made a little differently, and shapes may differ on purpose:
    these are not sure.
    """
    found = [
        Finding(name=name, text=f"the weights lack {name}, which most other layers have", sure=True)
        for name in companions(tensors)
    ]
    for stem, layers in sorted(stacks(tensors).items()):
        found += _lacking(stem, layers)
        found += _odd_shapes(stem, layers)
    return found


def companions(tensors: Mapping[str, Stored]) -> Iterator[str]:
    """Return the scales and the like that a module lacks and the same module of most layers has, where its weight is
    of the same dtype: layers that are left unquantized are not compared with those that are not.
    """
    for stem, layers in stacks(tensors).items():
        groups: dict[tuple[str, str], list[int]] = {}
        for number, layer in layers.items():
            for rest, stored in layer.items():
                module, _, leaf = rest.rpartition(".")
                if leaf in WEIGHT_LEAVES and stored.dtype not in FLOATS:
                    groups.setdefault((module, stored.dtype), []).append(number)
        for (module, _), numbers in groups.items():
            held = {n: {rest for rest in layers[n] if rest.startswith(f"{module}.")} for n in numbers}
            for rest in sorted(set().union(*held.values())):
                lacking = sorted(number for number in held if rest not in held[number])
                if len(lacking) * 2 < len(held):
                    yield from (f"{stem}.{number}.{rest}" for number in lacking)


def _names(layer: Mapping[str, Stored]) -> frozenset[str]:
    """The tensors of a layer, alike for a weight as it is and a quantized one."""
    plain = (rest for rest in layer if not _COMPANION.search(f".{rest}"))
    return frozenset(_PACKED.sub(".weight", rest) for rest in plain)


def _lacking(stem: str, layers: Mapping[int, Mapping[str, Stored]]) -> Iterator[Finding]:
    names = {number: _names(layer) for number, layer in layers.items()}
    kinds = Counter(names.values())
    usual = [kind for kind, count in kinds.items() if count > 1]
    for number, own in sorted(names.items()):
        larger = [kind for kind in usual if own < kind] if kinds[own] == 1 else []
        if not larger:
            continue
        nearest = min(larger, key=lambda kind: (len(kind), sorted(kind)))
        inner = min(layers) < number < max(layers)
        for rest in sorted(nearest - own):
            name = f"{stem}.{number}.{rest}"
            text = f"the weights lack {name}, which the layers like it have"
            yield Finding(name=name, text=text, sure=inner)


def _odd_shapes(stem: str, layers: Mapping[int, Mapping[str, Stored]]) -> Iterator[Finding]:
    by_rest: dict[str, dict[int, Shape]] = {}
    for number, layer in layers.items():
        for rest, tensor in layer.items():
            by_rest.setdefault(rest, {})[number] = tensor.shape
    for rest, shapes in sorted(by_rest.items()):
        (usual, often), *others = Counter(shapes.values()).most_common()
        for shape, count in others:
            if count == 1 and often == len(shapes) - 1 > 1:
                (number,) = (number for number, found in shapes.items() if found == shape)
                name = f"{stem}.{number}.{rest}"
                text = f"{name} has the shape {list(shape)}, in all other layers it is {list(usual)}"
                yield Finding(name=name, text=text, sure=False)
