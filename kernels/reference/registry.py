"""Which Python function stands for which ``npu::`` or ``atb::`` operator on the CPU dispatch key."""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
"""Operator name with namespace, for instance ``npu::npu_rms_norm`` → its reference."""


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the reference of the operator ``name`` (``ns::op`` or
    ``ns::op.overload``).

    The function takes exactly the arguments of the operator's schema, as CPU tensors.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in KERNELS, f"{name} has two references"
        KERNELS[name] = function
        return function

    return declare
