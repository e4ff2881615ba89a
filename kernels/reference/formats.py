"""The storage format of a tensor that a reference was given, where somebody can tell.

References compute on host tensors, which have no format. On the virtual NPU their memory is that of NPU tensors,
which do; tests on host tensors have nobody to ask.
"""

from collections.abc import Callable

import torch

from .checks import require

ND, FRACTAL_NZ = 2, 29
"""CANN's numbers (aclFormat): row by row, and tiles of 16 columns one below the other."""

_find: Callable[[int], int | None] | None = None


def provide(find: Callable[[int], int | None] | None) -> Callable[[int], int | None] | None:
    """Say how the format of memory is found by its address (None: not NPU memory), and get what was said before."""
    global _find
    before, _find = _find, find
    return before


def require_format(op: str, wanted: int, **tensors: torch.Tensor) -> None:
    """Refuse NPU tensors of another format than ``wanted``."""
    if _find is None:
        return
    for name, tensor in tensors.items():
        found = _find(tensor.untyped_storage().data_ptr())
        require(found in (None, wanted), op, f"{name} has storage format {found}, it must be {wanted}")
