"""Work in a forked process: what it costs to import is paid once, and a crash costs only its own answers.

The forking process must have opened no NPU: a fork cannot use its parent's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""For the forking process, before it imports torch and vLLM; engines fork their workers too."""

_fork = multiprocessing.get_context("fork")


class Broken(RuntimeError):
    """The work raised, died or took too long; the message says which."""


def _child(work: Callable[[], Iterator[Any]], pipe: Connection, log: Path) -> None:
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        for item in work():
            pipe.send((True, item))
        pipe.send((False, None))
    except Exception as error:  # noqa: BLE001 - supervisor: the parent is told, and goes on with other work
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"[:400]))
    sys.stdout.flush()
    os._exit(0)  # what engines left behind ends with the process group


def answers(work: Callable[[], Iterator[Any]], log: Path, deadline: float) -> Iterator[Any]:
    """What ``work`` yields in a process of its own, whose output goes to ``log``.

    :param deadline: seconds for all of it.
    :raises Broken: after what was answered before.
    """
    receiver, sender = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_child, args=(work, sender, log))
    process.start()
    sender.close()
    end = time.monotonic() + deadline
    try:
        while True:
            if not receiver.poll(max(0.0, end - time.monotonic())):
                raise Broken(f"no answer within {deadline:.0f} seconds")
            try:
                more, item = receiver.recv()
            except EOFError:
                process.join()
                raise Broken(f"its process ended with {process.exitcode}") from None
            if not more:
                if item is not None:
                    raise Broken(item)
                process.join(30)
                return
            yield item
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(30)
