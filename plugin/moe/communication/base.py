"""What every way of communication offers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts

Own = Callable[[], torch.Tensor]
"""Waits for what the shared experts make of the tokens that this rank alone computes them for: [t, hidden], where t are
all the rank's tokens, or, of those that tensor-parallel ranks share, the rank's part (:func:`own_rows`)."""


def own_rows(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of ``x`` [T, n] that is ``rank``'s where ``ranks`` divide it: [⌈T / ranks⌉, n], zeros behind its end."""
    share = -(-x.shape[0] // ranks)
    mine = x[rank * share : (rank + 1) * share]
    missing = share - mine.shape[0]
    return mine if missing == 0 else torch.cat([mine, x.new_zeros(missing, *x.shape[1:])])


def add_own_rows(x: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    """Add ``own``, as :func:`own_rows` has cut it, to its place in ``x``."""
    mine = x[rank * own.shape[0] : (rank + 1) * own.shape[0]]
    if mine.shape[0]:
        mine += own[: mine.shape[0]]


class Communication(ABC):
    """Brings this rank's tokens to the experts that they chose, wherever these are, and the results back."""

    @abstractmethod
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
        own: Own | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """The layer's output [T, hidden] for this rank's tokens, and whether it is whole.

        If not, the ranks of the tensor-parallel group hold summands of it. Every rank of the expert-parallel group
        calls this together, with an equal ``step``.

        :param x: [T, hidden]; T may differ between data-parallel ranks and is at least 1.
        :param weights: fp32 [T, k].
        :param experts: int32 [T, k].
        :param local: the experts of this rank.
        :param step: tokens of each data-parallel rank; None without data parallelism.
        :param own: what the output also has to hold, of the rank's own tokens.
        """
