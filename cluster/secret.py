"""The secret that an engine of a fleet wants to see signed: from a file that the user gives, or made for the fleet.

A made one begins with the fleet, travels through Ray to controller, engines and front ends, and is written to no disk.
"""

from __future__ import annotations

import os

from .router.lookaside.tokens import read_secret


def fleet_secret(file: str | None, made: str) -> bytes:
    """Return the secret in ``file``, or the one that was ``made`` if there is no file; empty if there is neither.

    Raises:
        ValueError: if the file cannot be read, or holds too little.
    """
    return read_secret(file) if file else made.encode()


def as_file(secret: str) -> str | None:
    """Return a path at which this process and its children read ``secret``; None if it is empty.

    The file lies in memory and goes with this process, however that ends.
    """
    if not secret:
        return None
    descriptor = os.memfd_create("npufleet-secret")
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
