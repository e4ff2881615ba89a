"""Which way of communication a step takes: decided on the host, alike on every rank, from sizes alone."""

from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """The ways of communication."""

    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    MC2 = "mc2"


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
    """Tokens of a replica up to which a step counts as small: those that are captured as graphs, at least."""
    sharing: int = 1
    """Ranks that divide the tokens of a replica."""
    gathers: bool = False
    """Whether they gather the results of those that are sent to experts."""
    mc2_tokens: int = 0
    """Tokens of a rank that MC2 takes: what its operators, their buffer and the memory for their rows allow."""
    shared_ranks: int = 0
    """Ranks that hold the shared experts and no others: rows reach them by MC2 or all-gather alone."""
    preferred: Way | None = None
    """What the user asked for: wherever it can be taken."""


SMALLEST_A2 = 16  # ranks: inside a node of eight NPUs of A2, all-gather is as fast and asks for no buffer


def worth_sending(chip: str, ranks: int, top_k: int, *, gathers: bool) -> bool:
    """Whether MC2 moves less than all-gather (or as much).

    Of a token that ranks share, all-gather moves no row before the experts and sums behind them, where sent rows are
    gathered: 2 rows for each but one rank, against 2 k / n + 1. Of others both ways move as :func:`choose` says.
    """
    less = 2 * top_k <= ranks if gathers else top_k < ranks
    return less and (chip != Chip.A2.value or ranks >= SMALLEST_A2)


def choose(layout: Layout, tokens: int) -> Way:
    """The way of a step whose largest replica has ``tokens`` tokens.

    With n ranks, all-gather and reduce-scatter move 2 (n − 1) rows for each token of a rank; all-to-all and MC2 move
    at most 2 k (n − 1) / n, which is less where a token goes to fewer experts than there are ranks. MC2 reads nothing
    on the host, but has room for few tokens. All-to-all reads the sizes, so small steps, which wait for the host and
    may be captured, go by all-gather where MC2 does not take them. So do nodes of A2: all-to-all is slow on the RoCE
    between them; and layers with ranks for shared experts alone.
    """
    if layout.ep_size == 1 or layout.preferred is Way.ALL_GATHER:
        return Way.ALL_GATHER
    share = -(-tokens // layout.sharing)
    if share <= layout.mc2_tokens and layout.preferred in (None, Way.MC2):
        return Way.MC2
    if tokens <= layout.capacity or layout.shared_ranks:
        return Way.ALL_GATHER
    if layout.preferred is Way.ALL_TO_ALL:
        return Way.ALL_TO_ALL
    if layout.chip is Chip.A2:
        return Way.ALL_GATHER
    return Way.ALL_TO_ALL if layout.top_k < layout.ep_size else Way.ALL_GATHER
