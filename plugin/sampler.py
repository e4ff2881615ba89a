"""Top-k and top-p filtering before sampling, through the fused operator."""

from collections.abc import Callable

import torch
from vllm.config.model import LogprobsMode
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from npufleet.kernels.ops.sampling import MAX_TOP_K, top_k_top_p


class NPUTopKTopPSampler(TopKTopPSampler):
    """vLLM's sampler with its filter computed by the NPU's operator, where the operator takes the batch.

    The operator takes k up to 1024 and a request without top-k carries the vocabulary size. Reading k from
    the device would wait for it, so the largest k of the batch comes from the runner's host copy.
    """

    def __init__(
        self,
        logprobs_mode: LogprobsMode,
        use_fp64_gumbel: bool,
        largest_top_k: Callable[[int], int],
    ) -> None:
        """``largest_top_k(B)`` gives the largest k of the running batch, whose logits have B rows."""
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self._largest_top_k = largest_top_k

    def forward_native(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample token ids [B] from ``logits`` [B, vocabulary], filtered by ``k`` [B] and ``p`` [B]."""
        if k is not None and self._largest_top_k(logits.shape[0]) > MAX_TOP_K:
            return super().forward_native(logits, generators, k, p)
        return super().forward_native(top_k_top_p(logits, p, k), generators, None, None)
