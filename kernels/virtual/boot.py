"""What happens when ``torch_npu`` is imported in an environment where the virtual NPU is enabled.

The boot file in site-packages (environment.py writes it) calls :func:`before_torch_npu` before the module
is executed and :func:`after_torch_npu` afterwards. Nothing here runs in a process that never imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Iterator
from pathlib import Path

from . import settings
from .build import KERNELS, RUNTIME, installed

_libraries: list[ctypes.CDLL] = []
_kernels_path = ""
_kernels: ctypes.CDLL | None = None
_ABSENT = "no virtual NPU in this process: torch_npu is not imported, or `enable` was not run"
COMMAND = "python -m npufleet.kernels.virtual enable"


def before_torch_npu(build: str, torch: str, torch_npu: str) -> None:
    """Load the stand-ins so that the loader finds CANN's sonames in place.

    ``build`` is the folder that ``enable`` recorded, ``torch`` and ``torch_npu`` the versions it is for.
    Raises ImportError when they no longer fit, ValueError when ``NPUFLEET_DEVICE`` does not parse.
    """
    now = installed()
    if (now.torch, now.torch_npu) != (torch, torch_npu):
        raise ImportError(
            f"the virtual NPU of this environment was built for torch {torch} and torch-npu {torch_npu}, "
            f"but torch {now.torch} and torch-npu {now.torch_npu} are installed: run `{COMMAND}` again"
        )
    global _kernels_path
    folder = Path(build)
    if not (folder / KERNELS).is_file():
        raise ImportError(
            f"the virtual NPU of this environment lacks its build {folder}: run `{COMMAND}` again"
        )
    wish = settings.from_environment()
    # With its task queue torch_npu would hand copies to another thread, beside kernels that run at once.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    runtime = ctypes.CDLL(str(folder / RUNTIME), mode=ctypes.RTLD_GLOBAL)
    _configure(runtime, wish)
    _libraries.append(runtime)
    for path in sorted(folder.glob("lib*.so")):
        if path.name not in (RUNTIME, KERNELS):
            _libraries.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
    _kernels_path = str(folder / KERNELS)


def _configure(runtime: ctypes.CDLL, wish: settings.Settings) -> None:
    configure, soc, wide = runtime.vnpu_configure, wish.soc, ctypes.c_int64
    configure.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64, wide, wide, wide, ctypes.c_int]
    configure.restype = None
    cores = (soc.cube_cores, soc.vector_cores)
    configure(soc.name.encode(), wish.count, wish.hbm_bytes, *cores, soc.l2_bytes, int(wish.null_mode))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops torch_npu's line on stdout that ASCEND_HOME_PATH is unset; all else it prints comes through."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        for line in text.getvalue().splitlines():
            if "ASCEND_HOME_PATH environment variable is not set" not in line:
                print(line)


def after_torch_npu() -> None:
    """Put our kernels under the operations that torch_npu has registered by now."""
    global _kernels
    assert _kernels_path, "before_torch_npu did not run"
    _kernels = ctypes.CDLL(_kernels_path)
    _kernels.vnpu_install_kernels.restype = ctypes.c_int
    assert _kernels.vnpu_install_kernels() > 0
    from npufleet.kernels import reference
    from npufleet.kernels.reference import communicator
    from npufleet.kernels.reference import formats as reference_formats

    from . import communicators, formats

    reference.install()
    communicator.provide(communicators.find)
    reference_formats.provide(formats.find)


def loaded() -> bool:
    """Whether this process has a virtual NPU."""
    return bool(_libraries)


def kernels() -> ctypes.CDLL:
    """The loaded kernel library. Raises RuntimeError in a process without a virtual NPU."""
    if _kernels is None:
        raise RuntimeError(_ABSENT)
    return _kernels


def runtime() -> ctypes.CDLL:
    """The loaded runtime library. Raises RuntimeError in a process without a virtual NPU."""
    if not _libraries:
        raise RuntimeError(_ABSENT)
    return _libraries[0]
