"""Communicators that join threads of one process, for references that move data between ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from npufleet.kernels.reference import communicator
from npufleet.kernels.reference.communicator import Pieces, Step

MIB = 1 << 20
DEADLINE = 60.0


@dataclass(kw_only=True)
class Meeting:
    """What the threads of one communicator share."""

    ranks: int
    chip: str = "Ascend910B3"
    buffer_bytes: int = 200 * MIB
    barrier: threading.Barrier = field(init=False)
    boxes: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    moved: dict[Step, int] = field(default_factory=dict)
    """Bytes by step, of all ranks."""

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=DEADLINE)


@dataclass(kw_only=True)
class ThreadCommunicator:
    """One thread's end."""

    meeting: Meeting
    rank: int

    @property
    def ranks(self) -> int:
        return self.meeting.ranks

    @property
    def buffer_bytes(self) -> int:
        return self.meeting.buffer_bytes

    @property
    def chip(self) -> str:
        return self.meeting.chip

    def exchange(self, step: Step, pieces: Pieces, sizes: list[int]) -> Pieces:
        meeting = self.meeting
        for to, piece in enumerate(pieces):
            meeting.boxes[self.rank, to] = piece
        meeting.barrier.wait()
        received = [meeting.boxes[source, self.rank] for source in range(self.ranks)]
        if self.rank == 0:
            total = sum(piece.numel() for piece in meeting.boxes.values())
            meeting.moved[step] = meeting.moved.get(step, 0) + total
        meeting.barrier.wait()
        assert [piece.numel() for piece in received] == sizes
        return received


@contextmanager
def provided(meeting: Meeting) -> Iterator[threading.local]:
    """Operators find this thread's end under every name; ``rank`` of what is yielded says which it is."""
    here = threading.local()
    before = communicator.provide(lambda name: ThreadCommunicator(meeting=meeting, rank=here.rank))
    try:
        yield here
    finally:
        communicator.provide(before)


def run_ranks(meeting: Meeting, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of each rank, rank 0 in this thread and the others in their own; the first error is raised."""
    with provided(meeting) as here, ThreadPoolExecutor(meeting.ranks) as pool:

        def one(rank: int) -> Any:
            here.rank = rank
            try:
                return work(rank)
            except (ValueError, RuntimeError, AssertionError) as error:
                meeting.barrier.abort()  # nobody waits for this rank any more
                return error

        futures = [pool.submit(one, rank) for rank in range(1, meeting.ranks)]
        found = [one(0), *(future.result() for future in futures)]
        errors = [value for value in found if isinstance(value, Exception)]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors
        return found
