"""What every way of communication offers."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.forward_context import DPMetadata

    from ..experts import LocalExperts


class Communication(ABC):
    """Brings this rank's tokens to the experts that they chose, wherever these are, and the results back."""

    @abstractmethod
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: "LocalExperts",
        step: "DPMetadata | None",
    ) -> tuple[torch.Tensor, bool]:
        """The layer's output [T, hidden] for this rank's tokens, and whether it is whole.

        If not, the ranks of the tensor-parallel group hold summands of it. Every rank of the expert-parallel group
        calls this together, with an equal ``step``.

        :param x: [T, hidden]; T may differ between data-parallel ranks and is at least 1.
        :param weights: fp32 [T, k].
        :param experts: int32 [T, k].
        :param local: the experts of this rank.
        :param step: tokens of each data-parallel rank; None without data parallelism.
        """
