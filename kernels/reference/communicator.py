"""Communicators that references of fused operators move data over, found by the name that the operator is given.

On the virtual NPU they are HCCL's; tests give ones that join threads or that move nothing.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch

Pieces = list[torch.Tensor]
"""One contiguous piece of bytes (uint8 [n]) for each rank, or from each rank."""


class Step(IntEnum):
    """What is moved; ranks that are at different steps find that out."""

    COUNTS = 0
    DISPATCH = 1
    COMBINE = 2


class Communicator(Protocol):
    """One rank's end of a communicator."""

    rank: int
    ranks: int
    buffer_bytes: int
    """HCCL_BUFFSIZE of it, which bounds what operators can move."""
    chip: str
    """The chip's name, such as ``Ascend910B3``; operators have other limits on each generation."""

    def exchange(self, step: Step, pieces: Pieces, sizes: list[int]) -> Pieces:
        """Send piece i to rank i; returns what each rank sent here, of which ``sizes`` [ranks] are the bytes.

        :raises RuntimeError: another rank does not come, or does not agree on step or sizes.
        """


_find: Callable[[str], Communicator] | None = None


def provide(find: Callable[[str], Communicator] | None) -> Callable[[str], Communicator] | None:
    """Say how communicators are found by name, and get what was said before; the finder raises RuntimeError for an
    unknown name.
    """
    global _find
    before, _find = _find, find
    return before


def communicator(op: str, name: str) -> Communicator:
    """The communicator called ``name``.

    :raises RuntimeError: there is none.
    """
    if _find is None:
        raise RuntimeError(
            f"{op}: nobody provides communicators in this process, group {name!r} cannot be found"
        )
    return _find(name)
