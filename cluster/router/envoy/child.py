"""Become Envoy, and end with whoever started it: ``child.py PARENT_PID PROGRAM ARGUMENT…``.

Run as a file, so that a fork of a process with threads runs nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's death, then execute the program."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("whoever started Envoy is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
