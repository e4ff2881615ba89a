"""A fleet's claim on a port that its front ends share.

With SO_REUSEPORT the kernel deals the clients of a port out to all who listen, and another fleet of the same user may
join without an error. So who opens a port of a fleet first holds a lock that names the fleet, as long as it lives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from pathlib import Path


class PortClaim:
    """A port of this machine that only front ends of one fleet may have."""

    def __init__(self, port: int, fleet: str, within: Path | None = None) -> None:
        """Claim ``port`` for the fleet that ``fleet`` stands for, which nobody learns from the claim.

        Raises:
            OSError: another fleet has it, or the claim cannot be written.
        """
        folder = (within or Path(tempfile.gettempdir())) / f"npufleet-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise OSError(f"{folder} belongs to somebody else; remove it")
        name = hashlib.sha256(fleet.encode()).digest()
        self._file = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(name)
        except BlockingIOError as error:
            self.close()
            raise OSError(error.errno, f"front ends of another fleet have port {port}") from error

    def _take(self, name: bytes) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._file, name, 0)  # nobody has it
        except BlockingIOError:
            pass
        fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.pread(self._file, len(name), 0) != name:
            raise BlockingIOError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def close(self) -> None:
        """Give it up."""
        os.close(self._file)
