"""The device operations in plain PyTorch: the oracle of the tests and the virtual NPU's kernels.

Each reference takes and returns CPU tensors and carries the real operator's name. :func:`install` puts all
of them on the CPU dispatch key, so that ``torch.ops.npu.npu_rms_norm(cpu_tensor, …)`` runs ours.
"""

import torch

# imported because they declare references
from . import (  # noqa: F401
    activation,
    attention,
    cast,
    grouped_matmul,
    kv_cache,
    mla,
    mla_prolog,
    moe,
    moe_distribute,
    norm,
    quant,
    quant_weight,
    rope,
    sampling,
)
from .registry import KERNELS

_libraries: dict[str, torch.library.Library] = {}


def install() -> None:
    """Register every reference on the CPU key. Call it after ``torch_npu`` is imported; again is free.

    :raises RuntimeError: an operator's schema is unknown to the dispatcher (torch_npu not imported, or
        another release of it that lacks the operator).
    """
    if _libraries:
        return
    for namespace in sorted({name.partition("::")[0] for name in KERNELS}):
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    for name, function in KERNELS.items():
        namespace, _, op = name.partition("::")
        _libraries[namespace].impl(op, function, "CPU")


__all__ = ["KERNELS", "install"]
