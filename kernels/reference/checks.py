"""The checks that every reference makes before it computes.

torch_npu's Meta kernels accept much that the device refuses or, worse, reads wrongly. The references
accept only what the operator documents, and name the operator and the argument in what they raise:
``ValueError`` for a wrong value, ``NotImplementedError`` for an argument that the operator knows and the
reference does not compute.
"""

from collections.abc import Iterable
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def require(condition: bool, op: str, message: str) -> None:
    """Raise ``ValueError`` with the operator's name unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def wrong(op: str, message: str) -> ValueError:
    """The error of a refusal, for checks that run often: they build the message only when they raise it."""
    return ValueError(f"{op}: {message}")


def require_dtype(op: str, name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype]) -> None:
    """Refuse a tensor whose dtype is not among ``allowed``."""
    if tensor.dtype not in (wanted := tuple(allowed)):
        raise ValueError(f"{op}: {name} is {tensor.dtype}, allowed are {', '.join(map(str, wanted))}")


def require_contiguous(op: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous (the device would read the wrong elements)."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )


def refuse_arguments(op: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse arguments in ``given`` that differ from their default: they would otherwise be ignored."""
    for name, value in given.items():
        if name not in defaults:
            continue
        default = defaults[name]
        if value is default:
            continue
        if isinstance(value, torch.Tensor) or value != default:
            shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise NotImplementedError(f"{op}: no reference for {name}={shown} (only {default})")
