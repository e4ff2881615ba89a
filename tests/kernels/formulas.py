"""What the operations should compute, written a second time: in float64, slowly, without sharing any code."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# one rounding of the result, and a few of intermediate values
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """``actual`` (any device) against float64 ``expected``, within what its dtype can hold."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.cpu().double(), expected, **TOLERANCE[actual.dtype])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight.double()


def rotate(x: torch.Tensor, angles: torch.Tensor, rotary_dim: int, neox: bool) -> torch.Tensor:
    """x [T, heads, size] turned pair by pair; angles [T, rotary_dim/2] in radians."""
    result = x.double().clone()
    for pair in range(rotary_dim // 2):
        i, j = (pair, pair + rotary_dim // 2) if neox else (2 * pair, 2 * pair + 1)
        cos, sin = angles[:, pair].cos().unsqueeze(-1), angles[:, pair].sin().unsqueeze(-1)
        a, b = x[..., i].double(), x[..., j].double()
        result[..., i] = a * cos - b * sin
        result[..., j] = b * cos + a * sin
    return result


def attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    query_lengths: list[int],
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """query [T, N, D]; per request keys [S, Nk, D] and values [S, Nk, Dv]. Returns float64 [T, N, Dv]."""
    heads, value_size = query.shape[1], values[0].shape[2] if values else query.shape[2]
    result = torch.zeros(query.shape[0], heads, value_size, dtype=torch.float64)
    start = 0
    for key, value, length in zip(keys, values, query_lengths, strict=True):
        count = key.shape[0]
        group = heads // key.shape[1]
        for offset in range(length):
            place = count - length + offset
            last = place + 1 if causal else count
            first = max(0, place - window + 1) if window else 0
            for head in range(heads):
                k, v = key[first:last, head // group].double(), value[first:last, head // group].double()
                if k.shape[0]:
                    weights = torch.softmax(k @ query[start + offset, head].double() * scale, 0)
                    result[start + offset, head] = weights @ v
        start += length
    return result


def top_k_top_p(logits: torch.Tensor, p: float | None, k: int | None) -> list[bool]:
    """Which of the logits [V] of one row stay."""
    values = logits.double().tolist()
    keep = [True] * len(values)
    if k is not None:
        least = sorted(values, reverse=True)[k - 1]
        keep = [value >= least for value in values]
    if p is not None:
        kept = torch.tensor([v if stays else float("-inf") for v, stays in zip(values, keep, strict=True)])
        probability = kept.double().softmax(0).tolist()
        order = sorted(range(len(values)), key=lambda i: (values[i], i))
        below = 0.0
        for i in order[:-1]:
            below += probability[i]
            if below <= 1 - p:
                keep[i] = False
    return keep
