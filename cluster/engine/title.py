"""The name under which an engine's core shows in `ps`.

vLLM names it with the package setproctitle, which looks for the room of the name below the first variable of the
environment. It finds none, and says nothing, if that variable has been set anew since the process began. Ray sets one
of its own, and hands variables on in an order that differs from process to process, so this happens now and then.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

NAME = "EngineCore"


def show(prefix: str) -> None:
    """Give this process the name ``prefix::EngineCore`` if it is a child of an engine that has not got it."""
    if multiprocessing.parent_process() is None or f"::{NAME}" in Path("/proc/self/cmdline").read_text():
        return
    from ray import _raylet

    native: Any = _raylet  # Ray's copy of that package also asks the kernel
    native.setproctitle(f"{prefix}::{NAME}")
