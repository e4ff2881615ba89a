"""Every rank gets every token and adds what its own experts make of it."""

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from .base import Communication, Own, add_own_rows

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` [T, n] with rows of zeros behind it up to ``rows``."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, x.shape[1])])


def drop_padding(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The first ``sizes[i]`` rows of each of the equal blocks of ``x``, one block per rank."""
    largest = max(sizes)
    if all(size == largest for size in sizes):
        return x
    return torch.cat([x[i * largest : i * largest + size] for i, size in enumerate(sizes)])


def restore_padding(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The inverse of :func:`drop_padding`, with zeros for what it dropped."""
    largest = max(sizes)
    if all(size == largest for size in sizes):
        return x
    return torch.cat([pad_rows(part, largest) for part in x.split(sizes)])


class AllGather(Communication):
    """All-gather before the experts, reduce-scatter behind them.

    Tokens that tensor-parallel ranks share are there already: without data parallelism nothing moves here, and
    the sum over the ranks is the all-reduce that a tensor-parallel layer makes anyway. No size is read from the
    device, so the step can be captured.
    """

    def __init__(self, config: FusedMoEConfig) -> None:
        self._sequence_parallel = config.is_sequence_parallel
        self._sp_size = config.sp_size

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
        own: Own | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """As :meth:`Communication.run`; whole only where the tokens are spread over the tensor-parallel ranks
        too.
        """
        out = self._routed(x, weights, experts, local, step)
        if own is not None and self._sequence_parallel:
            out += own()
        elif own is not None:
            add_own_rows(out, own(), get_tp_group().rank_in_group)
        return out, self._sequence_parallel and step is not None

    def _routed(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
    ) -> torch.Tensor:
        if step is None:
            return local.apply(x, weights, experts)
        group = get_ep_group() if self._sequence_parallel else get_dp_group()
        with step.sp_local_sizes(self._sp_size) as sizes:
            largest = max(sizes)
        # Weights and experts travel as one tensor of 32-bit words.
        choices = torch.cat([weights.view(torch.int32), experts], dim=1)
        x_all = drop_padding(group.all_gather(pad_rows(x, largest), dim=0), sizes)
        choices_all = drop_padding(group.all_gather(pad_rows(choices, largest), dim=0), sizes)
        weights_all, experts_all = (part.contiguous() for part in choices_all.chunk(2, dim=1))
        out = local.apply(x_all, weights_all.view(torch.float32), experts_all)
        out = group.reduce_scatter(restore_padding(out, sizes), dim=0)
        return out[: x.shape[0]]
