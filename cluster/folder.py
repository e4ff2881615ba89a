"""Temporary folders that do not outlive their process for long, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class Folder:
    """A new temporary folder, locked as long as its process lives.

    A killed process leaves its folder behind, but the kernel takes its lock away; whoever makes the next
    folder removes those. A lock also holds between containers that share the file system, where process ids
    say nothing.
    """

    def __init__(self, prefix: str, within: Path | None = None) -> None:
        """Make one whose name begins with ``prefix``, in ``within`` or the folder for temporary files."""
        remove_left_behind(prefix, within)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
            lock = _lock(self.path, fcntl.LOCK_EX)
            if lock is not None:  # otherwise somebody tidied up before it was locked
                self._lock: int | None = lock
                return

    def keep(self) -> None:
        """Hold the lock also in the program that this process becomes next."""
        if self._lock is not None:
            os.set_inheritable(self._lock, True)

    def close(self) -> None:
        """Remove it; a second time does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_left_behind(prefix: str, within: Path | None = None) -> None:
    """Remove the folders of processes that were killed."""
    for path in (within or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path, how: int) -> int | None:
    """Lock a folder and return the descriptor; None if it is locked, not ours or gone."""
    with contextlib.ExitStack() as undo:
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undo.callback(os.close, lock)
            fcntl.flock(lock, how)
        except OSError:
            return None
        if not path.exists():
            return None
        undo.pop_all()
        return lock
