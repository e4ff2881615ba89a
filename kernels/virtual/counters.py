"""Counts of what the virtual NPU did in this process: a measure of host overhead without noise."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from . import boot

_SYNCS = ("stream", "device", "event", "copy_to_host")  # order of vnpu::Sync in native/state.h


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Since the process started or :func:`reset` ran."""

    ops: dict[str, int]
    """Operations that reached the device, by name such as ``aten::add.Tensor``; only those called."""
    fast: dict[str, int]
    """Of those, and of their replays in graphs, the ones that a compiled kernel or a packed weight served."""
    syncs: dict[str, int]
    """Times the host waited for the device: ``stream``, ``device``, ``event``, ``copy_to_host``."""

    @property
    def calls(self) -> int:
        """All operations together."""
        return sum(self.ops.values())


def read() -> Counters:
    """The counts now. Raises RuntimeError in a process without a virtual NPU."""
    kernels, runtime = boot.kernels(), boot.runtime()
    kernels.vnpu_op_count.restype = ctypes.c_size_t
    kernels.vnpu_op_name.restype = ctypes.c_char_p
    kernels.vnpu_op_name.argtypes = [ctypes.c_size_t]
    kernels.vnpu_op_calls.restype = ctypes.c_uint64
    kernels.vnpu_op_calls.argtypes = [ctypes.c_size_t]
    kernels.vnpu_op_fast_runs.restype = ctypes.c_uint64
    kernels.vnpu_op_fast_runs.argtypes = [ctypes.c_size_t]
    runtime.vnpu_sync_count.restype = ctypes.c_uint64
    count = kernels.vnpu_op_count()
    names = [kernels.vnpu_op_name(i).decode() for i in range(count)]
    ops = {name: kernels.vnpu_op_calls(i) for i, name in enumerate(names)}
    fast = {name: kernels.vnpu_op_fast_runs(i) for i, name in enumerate(names)}
    syncs = {name: runtime.vnpu_sync_count(i) for i, name in enumerate(_SYNCS)}
    return Counters(
        ops={name: calls for name, calls in ops.items() if calls},
        fast={name: runs for name, runs in fast.items() if runs},
        syncs=syncs,
    )


def reset() -> None:
    """Start counting from zero. Raises RuntimeError in a process without a virtual NPU."""
    boot.kernels().vnpu_reset_op_calls()
    boot.runtime().vnpu_reset_sync_counts()
