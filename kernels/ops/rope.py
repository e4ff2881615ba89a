"""Rotary position embeddings (Su et al., 2021), plain and with the three axes of multimodal models (M-RoPE).

``cos_sin_cache`` [positions, rotary_dim] holds cosines in its left half and sines in its right half, in
the dtype of query. A pair (a, b) of a head turns to (a·cos − b·sin, b·cos + a·sin); the pairs are elements
i and i + rotary_dim/2 (``is_neox``) or 2i and 2i + 1. Elements of a head beyond rotary_dim pass through.
"""

import torch
import torch_npu


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    rotary_dim: int,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate query [T, heads · head_size] and key [T, kv_heads · head_size] (or None) at positions [T] (int32
    or int64).

    Returns new tensors of the same shapes.
    """
    if key is not None and _fits_fused(query, head_size, rotary_dim):
        mode = "half" if is_neox else "interleave"
        return torch_npu.npu_mrope(
            positions, query, key, cos_sin_cache, head_size, mrope_section=[0, 0, 0], rotary_mode=mode
        )
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    return _rotate_composed(query, key, cos, sin, head_size, rotary_dim, is_neox)


def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    rotary_dim: int,
    mrope_section: list[int],
    is_neox: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate at positions [3, T] (time, height, width); positions [T] mean :func:`rotary_embedding`.

    :param mrope_section: how many of the rotary_dim/2 frequencies each axis has; three numbers of that
        sum.
    :param interleaved: the axes alternate (time, height, width, time, … as in Qwen3-VL) instead of
        following each other.
    :raises ValueError: the sections do not add up.
    """
    if positions.dim() == 1:
        return rotary_embedding(positions, query, key, cos_sin_cache, head_size, rotary_dim, is_neox)
    if len(mrope_section) != 3 or sum(mrope_section) != rotary_dim // 2:
        raise ValueError(f"mrope_section is {mrope_section}, it must hold 3 numbers of sum {rotary_dim // 2}")
    # The fused op ends the strides of height and width both at section[1]: no form for unequal ones.
    equal = mrope_section[1] == mrope_section[2]
    if _fits_fused(query, head_size, rotary_dim) and (equal or not interleaved):
        return torch_npu.npu_mrope(
            positions,
            query,
            key,
            cos_sin_cache,
            head_size,
            mrope_section=list(mrope_section),
            rotary_mode="half" if is_neox else "interleave",
            cache_mode="interleave" if interleaved else "default",
        )
    chosen = cos_sin_cache.index_select(0, positions.flatten()).view(
        3, positions.shape[1], 2, rotary_dim // 2
    )
    cos, sin = _choose_axes(chosen, mrope_section, interleaved).unbind(1)
    return _rotate_composed(query, key, cos, sin, head_size, rotary_dim, is_neox)


def _fits_fused(query: torch.Tensor, head_size: int, rotary_dim: int) -> bool:
    """Whether npu_mrope takes it: whole heads, rotary_dim a multiple of 16 (fp32) or 32 (fp16, bf16)."""
    step = 16 if query.dtype == torch.float32 else 32
    return rotary_dim == head_size and rotary_dim % step == 0


def _choose_axes(chosen: torch.Tensor, section: list[int], interleaved: bool) -> torch.Tensor:
    """From [3, T, 2, half] the [T, 2, half] where each frequency has the position of its own axis."""
    if not interleaved:
        parts = chosen.split(section, dim=-1)
        return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    mixed = chosen[0].clone()
    for axis in (1, 2):
        where = slice(axis, 3 * section[axis], 3)
        mixed[..., where] = chosen[axis][..., where]
    return mixed


def _rotate_composed(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_size: int,
    rotary_dim: int,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same with npu_rotary_mul, for cos and sin [T, rotary_dim/2]."""
    if is_neox:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    else:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    mode = "half" if is_neox else "interleave"

    def rotate(x: torch.Tensor) -> torch.Tensor:
        # the layout BSND of the operator, with one sequence
        heads = x.reshape(1, x.shape[0], x.shape[1] // head_size, head_size)
        turned = torch_npu.npu_rotary_mul(heads[..., :rotary_dim].contiguous(), cos, sin, mode)
        if rotary_dim < head_size:
            turned = torch.cat((turned, heads[..., rotary_dim:]), dim=-1)
        return turned.reshape(x.shape)

    return rotate(query), None if key is None else rotate(key)
