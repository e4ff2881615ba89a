"""What is looked at in a forward pass of FakeTensors: operators against their references, memory, groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from npufleet.kernels.reference import KERNELS

NAMESPACES = ("npu", "atb")
RETURN_CACHES = ("npu::npu_kv_rmsnorm_rope_cache",)
"""They return the caches that they write into; their Meta kernels return new ones, which no device makes."""
FUSED = "npu::npu_moe_distribute_"
READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


class Watch(TorchDispatchMode):
    """The outermost mode. Host tensors are computed for real; a torch_npu operator's shapes come from its Meta
    kernel (or, for the forms that have none, from the outputs it is given) and are compared with its reference's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.shapes: defaultdict[str, set[Any]] = defaultdict(set)
        self.errors: list[str] = []
        self.groups: set[str] = set()
        self.rows_per_rank = 0
        """What the host is told when it reads how many rows go from one rank to another."""
        self._live: dict[Any, int] = {}
        self._total = self.peak = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch, and count memory from here on."""
        self._live.clear()
        self._total = self.peak = 0
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in READS:
            return self.rows_per_rank
        if func.namespace == "c10d":
            self._note_groups(args, kwargs)
        result = self._operator(func, args, kwargs) if func.namespace in NAMESPACES else func(*args, **kwargs)
        self._account(func.name(), result, tensors)
        return result

    def _operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name()
        self.calls[name] += 1
        if name.startswith(FUSED):
            self.groups.add("mc2")
        result = self._meta(func, name, args, kwargs)
        key = str(tree_map(_describe, (args, kwargs)))
        if key not in self.shapes[name]:
            self.shapes[name].add(key)
            self._compare(name, args, kwargs, result)
        return result

    def _meta(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            return func(*args, **kwargs)
        if "out" in kwargs:
            return tuple(kwargs["out"])
        if name.endswith("get_max_workspace"):
            return torch.empty(1, dtype=torch.uint8, device=args[0].device)
        return None  # it writes into tensors that it was given

    def _compare(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Let the reference look at the same shapes on the host, as far as it gets without data."""
        try:
            host = tree_map(_on_host, (args, kwargs))
            expected = KERNELS[name](*host[0], **host[1])
        except NEEDS_DATA:
            return  # all that can be told from shapes was accepted
        except (ValueError, NotImplementedError, KeyError, RuntimeError) as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}")
            return
        for got, want in zip(tree_leaves(result), tree_leaves(expected), strict=False):
            if not (torch.is_tensor(got) and torch.is_tensor(want)) or name.endswith("get_max_workspace"):
                continue
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                self.errors.append(
                    f"{name}: Meta {got.shape} {got.dtype}, reference {want.shape} {want.dtype}"
                )

    def _note_groups(self, args: Any, kwargs: Any) -> None:
        from vllm.distributed import parallel_state

        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = dist.ProcessGroup.unbox(value)
                for name in ("tp", "dcp", "dp", "ep", "pp", "world"):
                    known = getattr(parallel_state, f"_{name.upper()}")
                    if known is not None and known.device_group.group_name == group.group_name:
                        self.groups.add(name)

    def _account(self, name: str, result: Any, given: list[torch.Tensor]) -> None:
        """Add the memory of new storages on the NPU, drop that of storages that are gone. A storage that came in
        with an argument is not new: weights and caches do not count.
        """
        old = {StorageWeakRef(x.untyped_storage()) for x in given}
        for reference in [x for x in self._live if x.expired()]:
            self._total -= self._live.pop(reference)
        written = {tuple(x.shape) for x in given} if name in RETURN_CACHES else set()
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.device.type == "npu" and tuple(tensor.shape) not in written:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._live and reference not in old:
                    self._live[reference] = storage.nbytes()
                    self._total += storage.nbytes()
        self.peak = max(self.peak, self._total)


def _describe(value: Any) -> Any:
    if torch.is_tensor(value):
        return f"{tuple(value.shape)}{tuple(value.stride())}{value.dtype}"
    return value


def _on_host(value: Any) -> Any:
    if torch.is_tensor(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value
