"""Why an engine did not start, in one line that a user can act on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..hccl_errors import explain

MAX_CHARS = 600
LOG_ENDS = "its log ends: "
"""What stands before the last lines of a log in a message."""

OUT_OF_MEMORY = (
    "out of NPU memory: raise tensor_parallel_size, or lower max_num_batched_tokens, max_num_seqs or "
    "kv_cache_memory_bytes; `npufleet plan memory` shows what needs how much"
)
_NO_MEMORY = re.compile(r"NPU out of memory|^OutOfMemoryError")

_PROCESS = re.compile(r"\(pid=(?P<pid>\d+), ip=(?P<ip>[^,)\s]+)")

_WRONG_INPUT = (
    ValueError, TypeError, LookupError, AttributeError, ImportError, NotImplementedError, AssertionError,
)  # fmt: skip
"""Errors that a wrong checkpoint or setting raises, the same at every try. Others (memory, time, a peer, a port)
may be gone at the next."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The error that ended a start."""

    text: str
    final: bool  # every other try would end the same way
    pid: int = 0  # of the worker process it comes from, 0 if it comes from none
    node: str = ""  # address of that process's node

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """Return the cause that ``error`` tells, or that lies in it if it came from another process."""
        from ray.exceptions import RayTaskError

        pid, node = 0, ""
        while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
            if there := _PROCESS.search(str(error)):  # Ray keeps both in the text alone
                pid, node = int(there["pid"]), there["ip"]
            error = error.cause
        # transformers raises an OSError without a number for files that say something wrong.
        final = isinstance(error, _WRONG_INPUT) or (isinstance(error, OSError) and error.errno is None)
        final = final or type(error).__name__ == "SafetensorError"
        return cls(text=_one_line(error), final=final, pid=pid, node=node)


def _one_line(error: BaseException) -> str:
    details = getattr(error, "errors", None)  # pydantic's, whose own text repeats the input and a link
    if type(error).__name__ == "ValidationError" and callable(details):
        text = "; ".join(map(_refusal, details()))
    else:
        text = f"{type(error).__name__}: {error}"
    meaning = explain(text)
    text = " ".join(text.split())
    if _NO_MEMORY.search(text):  # whoever says it, and as whatever error it has come from a worker
        text = f"{OUT_OF_MEMORY} ({text.partition('If reserved memory')[0]})"
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} …"
    return f"{text} ({meaning})" if meaning else text


def _refusal(entry: Mapping[str, Any]) -> str:
    """One of pydantic's errors, with the field and what was given for it if it is about a field."""
    text = str(entry["msg"]).removeprefix("Value error, ")
    field = ".".join(map(str, entry["loc"]))
    return f"{field}: {text}, got {entry['input']!r}" if field else text


def kind(message: str) -> str:
    """Return what two failures for the same cause have in common: no log, and no process, time or size."""
    return re.sub(r"\d+", "#", message.partition(LOG_ENDS)[0])


class StartFailed(RuntimeError):
    """An engine did not start; ``cause`` says why."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def tell_failures(tell: Callable[[Cause], None]) -> None:
    """Call ``tell`` with what vLLM's engine core logs as its fault in this process.

    vLLM tells its parent process only that the core failed. The cause is in the core's log alone, whether it
    was raised in a worker, by the executor or by the core itself.
    """

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                tell(Cause.of(record.exc_info[1]))

    logging.getLogger("vllm.v1.engine.core").addHandler(Handler(logging.ERROR))
