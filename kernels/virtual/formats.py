"""Storage formats of the virtual NPU's memory, for references of operators that want weights in one of them."""

from __future__ import annotations

import ctypes

from . import boot


def find(address: int) -> int | None:
    """CANN's number of the format of the tensor whose memory begins at ``address``; None for host memory."""
    memory = ctypes.c_void_p(address)
    if not boot.runtime().vnpu_is_device_memory(memory):
        return None
    return int(boot.kernels().vnpu_format_of(memory))
