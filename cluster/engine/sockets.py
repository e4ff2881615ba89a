"""Where the processes of an engine meet: unix sockets in a folder of the engine's own.

vLLM makes them in the folder for temporary files, and they stay there if their process is killed. A folder goes as a
whole, with the engine or, where everything was killed at once, with the next engine that starts on the node.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..folder import Folder, remove_left_behind

BASE = "VLLM_RPC_BASE_PATH"
"""Where vLLM looks for the folder. The engine sets it for its processes."""
PREFIX = "npufleet-engine-"
_RANDOM = 8  # letters that the system adds to the name of a temporary folder
_SOCKET = 1 + 36  # how long vLLM's names are, with the slash before them
_LONGEST = 107  # a unix socket's path, as the kernel has it


def make() -> Folder:
    """Make the folder of this process and tell vLLM of it, and also the programs that this one starts or becomes."""
    folder = Folder(PREFIX, _parent())
    os.environ[BASE] = str(folder.path)
    return folder


def end(folder: Folder) -> None:
    """Remove the folder of this process; what is open stays open. Again changes nothing."""
    folder.close()
    if os.environ.get(BASE) == str(folder.path):
        del os.environ[BASE]


def make_on_other_node() -> None:
    """Make a folder for this process if its engine's is on another node, to stay as long as whatever it becomes."""
    told = _told()
    if told is not None and not told.is_dir():
        make().keep()


def remove() -> None:
    """Remove the engine's folder, of which this process was told; what is open stays open."""
    if told := _told():
        shutil.rmtree(told, ignore_errors=True)


def tidy() -> None:
    """Remove the folders of engines on this node of which no process is left."""
    remove_left_behind(PREFIX, _parent())


def _told() -> Path | None:
    path = Path(os.environ.get(BASE, ""))
    return path if path.name.startswith(PREFIX) else None


def _parent() -> Path:
    """Return where the user wants the folders, or where temporary files are, if no path gets too long there."""
    told = _told()
    wanted = told.parent if told else Path(os.environ.get(BASE) or tempfile.gettempdir())
    fits = len(os.fsencode(wanted)) + 1 + len(PREFIX) + _RANDOM + _SOCKET <= _LONGEST
    return wanted if fits else Path("/tmp")
