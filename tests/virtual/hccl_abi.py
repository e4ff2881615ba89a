"""The HCCL C functions of the virtual NPU's runtime library through ctypes, without torch. Values are those
of hccl/hccl_types.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from npufleet.kernels.virtual import build

from .hccl_launch import Outcome, Place
from .hccl_launch import launch as launch_places

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


@cache
def library_path() -> str:
    """The runtime library: the one that this process runs on, else that of the sources, built where need be.

    Two copies in one process would share some of their symbols and not others.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/" + build.RUNTIME):
            return line[line.index("/") :]
    return str(build.build() / build.RUNTIME)


def _load(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
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

    def __init__(self, path: str | None = None) -> None:
        self.lib = _load(path or library_path())

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
    die: Callable[[], None]

    def join(self) -> ctypes.c_void_p:
        return self.hccl.join(self.ranks, self.info, self.rank)


@dataclass(frozen=True, kw_only=True)
class _Work:
    work: Callable[[Rank], Any]
    library: str

    def __call__(self, place: Place) -> Any:
        hccl = Hccl(self.library)
        info = place.share("root-info", hccl.root_info)
        return self.work(Rank(hccl=hccl, rank=place.rank, ranks=place.ranks, info=info, die=place.die))


def launch(
    work: Callable[[Rank], Any], ranks: int, environment: dict[str, str] | None = None
) -> list[Outcome]:
    """Run ``work`` as ``ranks`` ranks that have a root info in common."""
    return launch_places(_Work(work=work, library=library_path()), ranks, environment)
