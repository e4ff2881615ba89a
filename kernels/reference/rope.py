"""References of the rotary embeddings.

A pair (a, b) of a head turns to (a·cos − b·sin, b·cos + a·sin). In ``half`` mode (GPT-NeoX) the pairs are
element i and i + d/2, in ``interleave`` mode (GPT-J) element 2i and 2i + 1. Products and sums are float32,
rounded once.
"""

import torch

from .checks import FLOATS, require, require_dtype, wrong
from .registry import reference

MODES = ("half", "interleave")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    """Turn x [T, heads, d] (any float dtype) by float32 cos and sin [T, d/2]; a new float32 tensor."""
    tokens, heads, size = x.shape
    half, pair = size // 2, 2 if mode == "half" else 3  # the dimension of the two elements of a pair
    pairs = x.float().reshape(tokens, heads, *((2, half) if pair == 2 else (half, 2)))
    out = pairs * cos.unsqueeze(1).unsqueeze(pair)
    (a, b), (new_a, new_b) = pairs.unbind(pair), out.unbind(pair)
    sin = sin.unsqueeze(1)
    new_a.addcmul_(b, sin, value=-1)
    new_b.addcmul_(a, sin)
    return out.view(x.shape)


def _select_sections(values: torch.Tensor, section: list[int], cache_mode: str) -> torch.Tensor:
    """From values [3, T, d/2] (time, height, width) take each frequency from the axis of its section."""
    time, height, width = values
    if cache_mode == "default":
        first, second = section[0], section[0] + section[1]
        return torch.cat((time[:, :first], height[:, first:second], width[:, second:]), dim=-1)
    mixed = time.clone()
    # The operator ends both strides at section[1]: it has no form for unequal height and width.
    mixed[:, 1 : section[1] * 3 : 3] = height[:, 1 : section[1] * 3 : 3]
    mixed[:, 2 : section[1] * 3 : 3] = width[:, 2 : section[1] * 3 : 3]
    return mixed


def _check_mrope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, head_size: int
) -> None:
    op = "npu_mrope"
    require_dtype(op, "query", query, FLOATS)
    require_dtype(op, "positions", positions, (torch.int32, torch.int64))
    if positions.dim() not in (1, 2) or (positions.dim() == 2 and positions.shape[0] != 3):
        raise wrong(op, f"positions {tuple(positions.shape)} must be [tokens] or [3, tokens]")
    tokens = positions.shape[-1]
    for name, x in (("query", query), ("key", key), ("cos_sin_cache", cache)):
        if x.dtype != query.dtype:
            raise wrong(op, f"{name} is {x.dtype}, query is {query.dtype}; they must be equal")
        if x.dim() != 2:
            raise wrong(op, f"{name} has {x.dim()} dimensions, it must have 2")
        if x is not cache and (x.shape[0] != tokens or x.shape[1] % head_size):
            raise wrong(op, f"{name} {tuple(x.shape)} must be [{tokens}, heads·{head_size}]")
    step = 16 if query.dtype == torch.float32 else 32
    longest, rotary = cache.shape
    if rotary % step:
        raise wrong(op, f"rotary_dim is {rotary}, for {query.dtype} it must be a multiple of {step}")
    if rotary > head_size:
        raise wrong(op, f"rotary_dim {rotary} exceeds the head size {head_size}")
    if positions.numel():
        lowest, highest = torch.aminmax(positions)
        if int(lowest) < 0 or int(highest) >= longest:
            raise wrong(op, f"a position lies outside 0 … {longest - 1}")


@reference("npu::npu_mrope")
def npu_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of query and key [T, heads·head_size] at positions [T], or [3, T] with three sections.

    ``cos_sin_cache`` [positions, rotary_dim] holds cosines in its left and sines in its right half; what a
    head has beyond rotary_dim passes through. ``cache_mode`` says how the three axes share the
    frequencies: one section after the other (``default``) or alternating (``interleave``). Source: CANN's
    aclnnRopeWithSinCosCache.
    """
    op = "npu_mrope"
    _check_mrope(positions, query, key, cos_sin_cache, head_size)
    if rotary_mode is None or rotary_mode not in MODES:
        raise wrong(op, f"rotary_mode is {rotary_mode!r}, allowed are {MODES}")
    if cache_mode is None or cache_mode not in ("default", "interleave"):
        raise wrong(op, f"cache_mode is {cache_mode!r}, allowed are 'default' and 'interleave'")
    section = list(mrope_section) if mrope_section else [0, 0, 0]
    tokens, rotary = query.shape[0], cos_sin_cache.shape[1]
    cos_sin = cos_sin_cache.index_select(0, positions.reshape(-1)).float()
    if positions.dim() == 2:
        if len(section) != 3 or sum(section) != rotary // 2:
            raise wrong(op, f"mrope_section is {section}, it must hold 3 numbers of sum {rotary // 2}")
        halves = cos_sin.view(3, tokens, 2, rotary // 2)
        cos = _select_sections(halves[:, :, 0], section, cache_mode)
        sin = _select_sections(halves[:, :, 1], section, cache_mode)
    else:
        if any(section):
            raise wrong(op, f"mrope_section is {section} but positions has one dimension")
        cos, sin = cos_sin.view(tokens, 2, rotary // 2).unbind(1)
    heads, key_heads = query.shape[1] // head_size, key.shape[1] // head_size
    both = torch.cat((query.view(tokens, heads, head_size), key.view(tokens, key_heads, head_size)), dim=1)
    turned = _rotate(both[..., :rotary], cos, sin, rotary_mode)
    if rotary < head_size:
        both[..., :rotary] = turned
        turned = both
    results = query.new_empty(query.shape), key.new_empty(key.shape)
    results[0].view(tokens, heads, head_size).copy_(turned[:, :heads])
    results[1].view(tokens, key_heads, head_size).copy_(turned[:, heads:])
    return results


@reference("npu::npu_rotary_mul")
def npu_rotary_mul(
    self: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """x·r1 + turn(x)·r2 for x with 4 dimensions; r1 (cosines) and r2 (sines) broadcast against x, same last
    dimension.

    ``turn`` is (−b, a) of the halves or of the neighbours. A ``rotate`` matrix has no reference.
    """
    op = "npu_rotary_mul"
    if rotate is not None:
        raise NotImplementedError(f"{op}: no reference for rotate")
    require_dtype(op, "x", self, FLOATS)
    require(rotary_mode in MODES, op, f"rotary_mode is {rotary_mode!r}, allowed are {MODES}")
    require(self.dim() == 4, op, f"x has {self.dim()} dimensions, it must have 4")
    last = self.shape[-1]
    require(last % 2 == 0 and last < 896, op, f"the last dimension is {last}, it must be even and below 896")
    for name, r in (("r1", r1), ("r2", r2)):
        require(r.dtype == self.dtype, op, f"{name} is {r.dtype}, x is {self.dtype}; they must be equal")
        fits = r.dim() == 4 and r.shape[-1] == last
        fits = fits and all(n in (1, full) for n, full in zip(r.shape, self.shape, strict=True))
        require(fits, op, f"{name} {tuple(r.shape)} does not broadcast to x {tuple(self.shape)}")
    require(r1.shape == r2.shape, op, f"r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} differ")
    x = self.float()
    if rotary_mode == "half":
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat((-b, a), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * r1.float()).addcmul_(turned, r2.float()).to(self.dtype)
