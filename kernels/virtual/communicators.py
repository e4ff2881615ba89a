"""Communicators of the virtual NPU's HCCL by their names, for references that move data between ranks."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import boot, settings

if TYPE_CHECKING:
    from npufleet.kernels.reference.communicator import Pieces, Step


def _numbers(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def _check(code: int) -> None:
    if code:
        recent = boot.runtime().aclGetRecentErrMsg
        recent.restype = ctypes.c_char_p
        raise RuntimeError(f"{(recent() or b'').decode()} (HCCL error code {code})")


@dataclass(frozen=True, kw_only=True)
class HcclCommunicator:
    """As :class:`npufleet.kernels.reference.communicator.Communicator`."""

    name: str
    rank: int
    ranks: int
    buffer_bytes: int
    chip: str

    def exchange(self, step: Step, pieces: Pieces, sizes: list[int]) -> Pieces:
        """One all-to-all between the processes of the communicator, with HCCL's deadline and errors."""
        import torch

        assert len(pieces) == len(sizes) == self.ranks
        send, receive = torch.cat(pieces), torch.empty(sum(sizes), dtype=torch.uint8)
        _check(
            boot.runtime().vnpu_hccl_move_rows(
                self.name.encode(),
                ctypes.c_uint32(step),
                ctypes.c_void_p(send.data_ptr()),
                _numbers([piece.numel() for piece in pieces]),
                ctypes.c_void_p(receive.data_ptr()),
                _numbers(sizes),
            )
        )
        ends = itertools.accumulate(sizes)
        return [receive[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def find(name: str) -> HcclCommunicator:
    """The communicator of this process that HCCL knows as ``name``.

    :raises RuntimeError: there is none.
    """
    found = _numbers([0, 0, 0])
    _check(boot.runtime().vnpu_hccl_group(name.encode(), found))
    rank, ranks, buffer_bytes = found
    chip = settings.from_environment().soc.name
    return HcclCommunicator(name=name, rank=rank, ranks=ranks, buffer_bytes=buffer_bytes, chip=chip)
