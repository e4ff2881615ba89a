"""A fleet's claim on a port that its front ends share.

With SO_REUSEPORT the kernel deals the clients of a port out to all who listen, and another program of the same user may
join without an error. So who opens a port of a fleet first holds a lock that names the fleet, as long as it lives, and
the first one looks whether somebody else listens already.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from .addresses import netloc

_NETWORK = Path("/proc/self/ns/net")


class PortClaim:
    """A port of this machine that only front ends of one fleet may have."""

    def __init__(self, host: str, port: int, fleet: str, within: Path | None = None) -> None:
        """Claim ``port`` for the fleet that ``fleet`` stands for, which nobody learns from the claim.

        Raises:
            OSError: another fleet has it or another program listens on it at ``host``, or the claim cannot be written.
        """
        self._folder = (within or Path(tempfile.gettempdir())) / f"npufleet-ports-{os.getuid()}"
        self._lock = _hold(self._folder)
        file = self._folder / f"{_network()}-{port}"
        self.shared = True
        """Another front end of this fleet had it already."""
        try:
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            os.close(self._lock)
            raise
        try:
            self._take(hashlib.sha256(fleet.encode()).digest(), host, port)
        except OSError:
            self.close()  # or its lock would refuse the next attempt
            raise

    def _take(self, name: bytes, host: str, port: int) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:  # nobody has it
            _nobody_listens(host, port)
            os.pwrite(self._file, name, 0)
            self.shared = False
        fcntl.flock(self._file, fcntl.LOCK_SH)  # nobody holds more for longer than it takes to write a name
        if os.pread(self._file, len(name), 0) != name:
            raise OSError(errno.EADDRINUSE, f"front ends of another fleet have port {port}")

    def touch(self) -> None:
        """Say now and then that it is in use: systems remove temporary files that are some days old."""
        os.utime(self._file)
        os.utime(self._lock)

    def close(self) -> None:
        """Give it up; the last claim of a user takes their folder along."""
        os.close(self._file)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _hold(folder: Path) -> int:
    """Make the folder of this user's claims and return a descriptor that keeps it there.

    In a folder that everybody may write to, somebody else may have made it.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the last claim took it along meanwhile
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise OSError(
                    errno.EACCES,
                    "it is not a folder that only this user can write to; remove it",
                    str(folder),
                )
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_SH)  # until whoever removes it is done
            if os.fstat(lock).st_nlink:  # else it is removed
                return lock
            os.close(lock)


def _network() -> int:
    """Which network this process is in: those of containers and namespaces may share a folder, and no port."""
    return _NETWORK.stat().st_ino if _NETWORK.exists() else 0


def _nobody_listens(host: str, port: int) -> None:
    """See that a port that no front end of this fleet has is not somebody else's, who would share it too."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            text = f"cannot listen on {netloc(host, port)}: {error.strerror}"
            raise OSError(error.errno, text) from error
