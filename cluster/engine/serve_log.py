"""Serve's log in the process of an engine.

vLLM configures logging before anything else, and Python's ``dictConfig`` closes all handlers that there are. The one
through which Serve writes its log forgets its file then, and a Serve controller that starts again, after the loss of
the head for example, takes a replica without such a file for broken and ends it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler

NAME = "ray.serve"


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Give Serve's handlers their files back, whatever happens to them within."""
    handlers = [h for h in logging.getLogger(NAME).handlers if isinstance(h, MemoryHandler)]
    files = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            handler.setTarget(file)  # a file that was closed is opened again with its next line
