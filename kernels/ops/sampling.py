"""Filters of logits before sampling."""

import torch
import torch_npu

MAX_TOP_K = 1024  # the largest k that npu_top_k_top_p takes


def top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None) -> torch.Tensor:
    """Set to −inf all logits but the k largest, and of these but the smallest set that holds the probability
    p.

    :param logits: [B, vocabulary] in fp32, fp16 or bf16.
    :param p: [B] in [0, 1], cast to the dtype of logits; None leaves that filter out (nucleus sampling,
        Holtzman 2020).
    :param k: [B] integers in [1, 1024]; None leaves that filter out. Ties with the k-th largest stay.
    :returns: logits, filtered, a new tensor unless both filters are None.
    """
    if p is None and k is None:
        return logits
    if p is not None:
        p = p.to(logits.dtype)
    if k is not None:
        k = k.to(torch.int32)
    return torch_npu.npu_top_k_top_p(logits, p, k)
