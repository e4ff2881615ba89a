"""The shared experts of a layer, which every token takes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.linear import RowParallelLinear

from .communication.base import Own, own_rows
from .shared_linear import claim


@cache
def side_stream(device: int) -> Any:
    """The stream of ``device`` that shared experts run on where they are overlapped; one for all layers."""
    return torch.npu.Stream(device)


class Aside:
    """Runs a layer's work on the side stream, beside what the current stream does next.

    Tensors need no keeping alive: each stream waits for the other before it reuses what the other read.
    """

    def __init__(self) -> None:
        self._stream = side_stream(torch.npu.current_device())
        self._ready, self._done = torch.npu.Event(), torch.npu.Event()

    def start(self, work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Own:
        """Start ``work`` on ``x``; what is returned makes the current stream wait for the result."""
        self._ready.record(torch.npu.current_stream())
        with torch.npu.stream(self._stream):
            self._stream.wait_event(self._ready)
            out = work(x)
            self._done.record(self._stream)

        def join() -> torch.Tensor:
            torch.npu.current_stream().wait_event(self._done)
            return out

        return join


class SharedExperts:
    """The shared experts on a rank that has all of them, or a slice of each.

    Whole, they are computed for the rank's own tokens: those that only it has, or its part of those that
    tensor-parallel ranks share. Sliced, they are computed for all tokens of the replica, and the results are summed up
    over its ranks.
    """

    def __init__(self, layer: nn.Module, moe: FusedMoEConfig, *, overlap: bool) -> None:
        claim(layer)
        self._layer = layer
        self._spread = moe.is_sequence_parallel
        sums = [part.tp_size for part in layer.modules() if isinstance(part, RowParallelLinear)]
        self._whole = max(sums) == 1 if sums else self._spread
        self._aside = Aside() if overlap else None

    @property
    def own(self) -> bool:
        """Whether :meth:`start` makes whole results of the rank's own tokens, rather than summands of all."""
        return self._whole or self._spread

    def start(self, x: torch.Tensor) -> Own:
        """Start on ``x`` [T, hidden], which every rank of the replica has or, with sequence parallelism, a part each.

        Collectives stay on the current stream: all of a rank's collectives keep one order.

        :returns: waits for the result: [t, hidden], see :attr:`own`.
        """
        group = get_tp_group()
        if self._spread and not self._whole:
            x = group.all_gather(x, dim=0)
        elif self._whole and not self._spread:
            x = own_rows(x, group.rank_in_group, group.world_size)
        if self._aside is None:
            out = self._layer(x)
            return lambda: self._finish(out)
        wait = self._aside.start(self._layer, x)
        return lambda: self._finish(wait())

    def _finish(self, out: torch.Tensor) -> torch.Tensor:
        return get_tp_group().reduce_scatter(out, dim=0) if self._spread and not self._whole else out
