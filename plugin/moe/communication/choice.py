"""Which way of communication a step takes: decided on the host, alike on every rank, from sizes alone."""

from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """The ways of communication."""

    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


class Chip(Enum):
    """Generations of NPUs, by how their dies are connected."""

    A2 = "A2"
    """Ascend 910B: eight NPUs of a node in a full mesh, nodes over RoCE."""
    A3 = "A3"
    """Ascend 910_93 (910C): up to 384 dies in one super-pod."""
    A5 = "A5"
    """Ascend 950."""


_NAMES = {"Ascend910B": Chip.A2, "Ascend910_93": Chip.A3, "Ascend910_95": Chip.A5, "Ascend950": Chip.A5}


def chip_of(name: str) -> Chip:
    """The generation of a chip by its name, such as ``Ascend910B3``.

    :raises ValueError: a chip that experts cannot be spread over.
    """
    for start, chip in _NAMES.items():
        if name.startswith(start):
            return chip
    raise ValueError(
        f"mixture-of-experts models are not supported on {name}; supported are {', '.join(_NAMES)} …"
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What does not change from step to step."""

    chip: Chip
    ep_size: int
    """Ranks that the experts are spread over; 1 without expert parallelism."""
    top_k: int
    capacity: int
    """Tokens of a rank up to which a step counts as small: those that are captured as graphs, at least."""


def choose(layout: Layout, tokens: int) -> Way:
    """The way of a step whose largest rank has ``tokens`` tokens.

    With n ranks, all-gather and reduce-scatter move 2 (n − 1) rows for each token of a rank; all-to-all moves at most
    2 k (n − 1) / n, which is less where a token goes to fewer experts than there are ranks. It has to read the sizes
    on the host, so small steps, which wait for the host and may be captured, stay with all-gather. So do nodes of A2:
    all-to-all is slow on the RoCE between them.
    """
    if layout.ep_size == 1 or tokens <= layout.capacity or layout.chip is Chip.A2:
        return Way.ALL_GATHER
    return Way.ALL_TO_ALL if layout.top_k < layout.ep_size else Way.ALL_GATHER
