"""What one node can hold: which of its free NPUs may form tensor-parallel groups, by the rules of its chip.

Sources of the rules: the schedulers' documentation of MindCluster (A3: one NPU or an even number, in whole
packages; A2 servers of 16: up to 8 in one HCCS ring, 10, 12, 14 or 16 split evenly over the two rings at the same
positions).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..topology.model import Shape, indices_of, mask_of

Groups = tuple[int, ...]
"""A mask of NPU indices for each tensor-parallel group."""


@lru_cache(maxsize=1 << 16)
def groups(shape: Shape, free: int, size: int, most: int, alone: bool) -> Groups:
    """Return up to ``most`` groups of ``size`` NPUs out of the free ones.

    Those that leave the largest whole holes are taken: first what is broken already, then the fullest domain.

    Args:
        shape: the node's wiring.
        free: mask of free, healthy NPUs.
        size: NPUs of a group.
        most: how many groups are wanted.
        alone: whether the whole engine is this one NPU, which may then take half a die pair.
    """
    if shape.packages:
        if alone:
            return _one_die(shape, free)
        if size > 1 and size % 2:
            return ()
        free = _whole(shape, free)
    if shape.rings and size > (ring := shape.domains[0].bit_count()):
        return () if size % 2 or size > 2 * ring else _over_rings(shape, free, size, most)
    return _in_domains(shape, free, size, most)


@lru_cache(maxsize=1 << 16)
def room(shape: Shape, free: int, size: int, alone: bool) -> int:
    """Return how many groups of ``size`` the node can hold."""
    return len(groups(shape, free, size, shape.mask.bit_count(), alone))


@lru_cache(maxsize=1 << 16)
def broken(shape: Shape, free: int) -> tuple[int, int]:
    """Return how many domains are in use, and how many die pairs are half in use."""
    used = sum(free & domain != domain for domain in shape.domains)
    return used, sum(free & pair not in (0, pair) for pair in shape.packages)


def illegal(shape: Shape, size: int, count: int) -> bool:
    """Say whether the chip's rules forbid an engine of ``count`` groups of ``size`` even if all were idle."""
    if shape.packages and size * count > 1 and (size % 2 if size > 1 else count % 2):
        return True
    ring = shape.domains[0].bit_count() if shape.rings else 0
    return bool(ring) and ring < size <= 2 * ring and size % 2 == 1


def widest(shape: Shape) -> int:
    """Return the most NPUs that a tensor-parallel group can have on an idle node of this shape."""
    sizes = [domain.bit_count() for domain in shape.domains]
    return sum(sizes) if shape.rings else max(sizes, default=0)


def _whole(shape: Shape, free: int) -> int:
    """The free NPUs without the halves of die pairs whose other half is taken."""
    for pair in shape.packages:
        if free & pair != pair:
            free &= ~pair
    return free


def _one_die(shape: Shape, free: int) -> Groups:
    if not free:
        return ()
    halves = [free & pair for pair in shape.packages if free & pair not in (0, pair)]
    best = halves[0] if halves else free
    return (best & -best,)


def _in_domains(shape: Shape, free: int, size: int, most: int) -> Groups:
    """Fill one domain if one can hold them all, the fullest such; otherwise the emptiest ones first."""
    open_ = sorted((n := (free & domain).bit_count(), n // size, free & domain) for domain in shape.domains)
    fitting = [entry for entry in open_ if entry[1] >= most]
    chosen = fitting[:1] or open_[::-1]
    found: list[int] = []
    for _, _, mask in chosen:
        found += _chunks(indices_of(mask), size)
    return tuple(sorted(found[:most], key=lambda mask: mask & -mask))


def _over_rings(shape: Shape, free: int, size: int, most: int) -> Groups:
    first, second = (indices_of(domain) for domain in shape.domains)
    both = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if free >> one & 1 and free >> other & 1
    ]
    half = size // 2
    found = [mask_of(i for pair in both[k : k + half] for i in pair) for k in range(0, len(both), half)]
    return tuple(mask for mask in found if mask.bit_count() == size)[:most]


def _chunks(indices: tuple[int, ...], size: int) -> Iterable[int]:
    return [mask_of(indices[k : k + size]) for k in range(0, len(indices) - size + 1, size)]
