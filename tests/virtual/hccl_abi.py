"""The HCCL C functions of the virtual NPU's runtime library through ctypes, without torch, and a launcher
for several ranks as processes. Values are those of hccl/hccl_types.h."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from npufleet.kernels.virtual import build

INT32, FP32 = 2, 4
SUM = 0
PARA, NOT_SUPPORT, TIMEOUT, REMOTE = 1, 5, 9, 21
ROOT_INFO_SIZE = 4108
Array = ctypes.Array


class HcclError(RuntimeError):
    """What an entry point answered: its code, and the text that aclGetRecentErrMsg has for it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code


def library() -> ctypes.CDLL:
    """The runtime library. Building it, where that has not happened yet, takes half a minute."""
    lib = ctypes.CDLL(str(build.build() / build.RUNTIME))
    lib.aclGetRecentErrMsg.restype = ctypes.c_char_p
    lib.vnpu_hccl_counter_name.restype = ctypes.c_char_p
    lib.HcclGetErrorString.restype = ctypes.c_char_p
    return lib


def floats(*values: float) -> Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)


def u64(values: Sequence[int]) -> Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


class Hccl:
    """Calls that raise HcclError instead of returning a code."""

    def __init__(self) -> None:
        self.lib = library()

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.lib, f"Hccl{name}")

        def call(*arguments: Any) -> None:
            # Counts are 64 bits wide; ctypes would pass a plain int as 32.
            code = function(*[ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments])
            if code:
                raise HcclError(code, (self.lib.aclGetRecentErrMsg() or b"").decode())

        return call

    def root_info(self) -> bytes:
        info = ctypes.create_string_buffer(ROOT_INFO_SIZE)
        self.GetRootInfo(info)
        return info.raw

    def join(self, ranks: int, info: bytes, rank: int) -> ctypes.c_void_p:
        comm = ctypes.c_void_p()
        self.CommInitRootInfo(ranks, info, rank, ctypes.byref(comm))
        return comm


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Handed to the function that a rank runs."""

    hccl: Hccl
    rank: int
    ranks: int
    info: bytes
    """Root info that rank 0 made."""

    def join(self) -> ctypes.c_void_p:
        return self.hccl.join(self.ranks, self.info, self.rank)

    def die(self) -> None:
        """End at once, like a process that the kernel kills."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``value`` that a rank returned, or ``error`` it raised, or neither when it died. ``pid`` is its process."""

    value: Any = None
    error: str | None = None
    pid: int = 0


def _rank(work: Callable[..., Any], rank: int, ranks: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    hccl = Hccl()
    if rank == 0:
        pipe.send(hccl.root_info())
    info = pipe.recv()
    try:
        pipe.send(Outcome(value=work(Rank(hccl=hccl, rank=rank, ranks=ranks, info=info)), pid=os.getpid()))
    except HcclError as error:
        pipe.send(Outcome(error=str(error), pid=os.getpid()))
    pipe.recv()  # stay alive until all have finished: a rank that ends looks dead to the others


def launch(work: Callable[[Rank], Any], ranks: int, environment: dict[str, str] | None = None) -> list[Outcome]:
    """Run ``work`` in ``ranks`` processes and return what became of each. Fails after 60 s."""
    library()  # built here once, not by all ranks
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(work, r, ranks, pipes[r][1], environment or {}), daemon=True)
        for r in range(ranks)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        info = _receive(pipes[0][0])
        for mine, _ in pipes:
            mine.send(info)
        outcomes = [_outcome(mine) for mine, _ in pipes]
        for (mine, _), outcome in zip(pipes, outcomes, strict=True):
            if outcome.pid:
                mine.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
    return outcomes


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(60):
        raise TimeoutError("a rank did not answer within 60 s")
    return pipe.recv()


def _outcome(pipe: Connection) -> Outcome:
    try:
        return _receive(pipe)
    except EOFError:
        return Outcome()
