"""What the engine-core process tells its engine during the start.

vLLM builds workers, weights and KV cache in a child process and says nothing until all is done. Our executor,
which runs there, announces each phase on a datagram socket named after its parent, at last the shared memory
that must not outlive the engine, and why the start failed if it did. The socket's name lies in Linux's abstract
namespace, so nothing is left in the file system however the processes end.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum

from .causes import Cause

_SHARED = "shared:"
_NPUS = "npus:"
_FAILED = "failed:"


class StartPhase(StrEnum):
    """What core and workers are busy with during a start, in this order."""

    PROCESSES = "processes"  # worker processes start and import
    GROUPS = "groups"  # devices are opened and HCCL groups formed
    WEIGHTS = "weights"  # weights are loaded
    CACHE = "cache"  # memory is measured and the KV cache laid out
    GRAPHS = "graphs"  # graphs are captured, kernels warmed up


def _address(pid: int) -> bytes:
    return b"\0npufleet-engine-%d" % pid


def announce(phase: StartPhase, pid: int | None = None) -> None:
    """Tell process ``pid``, the parent by default; without a listener there (a test, a debugger) nothing happens."""
    _send(phase, pid)


def announce_shared(paths: Iterable[str]) -> None:
    """Tell the parent process which shared memory the engine's processes use."""
    _send(_SHARED + "\n".join(paths))


def announce_npus(npus: Iterable[str]) -> None:
    """Tell the parent process which NPU each rank has, as NODE_ID:NUMBER."""
    _send(_NPUS + "\n".join(npus))


def announce_failure(cause: Cause) -> None:
    """Tell the parent process why the start failed."""
    _send(_FAILED + json.dumps(asdict(cause)))


def _send(text: str, pid: int | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(text.encode(), _address(pid or os.getppid()))
        except OSError:
            return


class PhaseListener:
    """Receives what the child process announces."""

    def __init__(self) -> None:
        self.shared: list[str] = []
        self.npus: tuple[str, ...] = ()
        self.failure: Cause | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(os.getpid()))
        self._socket.setblocking(False)

    def poll(self) -> StartPhase | None:
        """Return the next phase that was announced, None if there is none yet; fills ``shared``, ``npus`` and
        ``failure`` on the way.
        """
        while True:
            try:
                text = self._socket.recv(1 << 16).decode()
            except BlockingIOError:
                return None
            if text.startswith(_FAILED):
                self.failure = Cause(**json.loads(text.removeprefix(_FAILED)))
            elif text.startswith(_NPUS):
                self.npus = tuple(text.removeprefix(_NPUS).split())
            elif text.startswith(_SHARED):
                self.shared = text.removeprefix(_SHARED).split()
            else:
                return StartPhase(text)

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()
