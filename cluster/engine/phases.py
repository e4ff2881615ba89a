"""How the engine-core process tells its engine how far the start has come.

vLLM builds workers, weights and KV cache in a child process and says nothing until all is done. Our executor,
which runs there, announces each phase on a datagram socket named after its parent. The name lives in Linux's
abstract socket namespace, so nothing is left in the file system however the processes end.
"""

from __future__ import annotations

import os
import socket
from enum import StrEnum


class StartPhase(StrEnum):
    """What the engine core is busy with during its start, in this order."""

    WORKERS = "workers"  # worker processes start and load weights
    CACHE = "cache"  # memory is measured, the KV cache laid out, graphs captured


def _address(pid: int) -> bytes:
    return b"\0npufleet-engine-%d" % pid


def announce(phase: StartPhase) -> None:
    """Tell the parent process; without a listener there (a test, a debugger) nothing happens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(phase.encode(), _address(os.getppid()))
        except OSError:
            return


class PhaseListener:
    """Receives what the child process announces."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(os.getpid()))
        self._socket.setblocking(False)

    def poll(self) -> StartPhase | None:
        """Return the next phase that was announced, None if there is none yet."""
        try:
            return StartPhase(self._socket.recv(64).decode())
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()
