import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from npufleet.kernels.ops import rope

from . import formulas
from .formulas import DTYPES, assert_close

LENGTH = 128


def make_cache(rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_sin_cache in dtype, its angles [positions, rotary_dim/2] in float64)."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), angles


def check(
    got: torch.Tensor, x: torch.Tensor, angles: torch.Tensor, head: int, rotary: int, neox: bool
) -> None:
    expected = formulas.rotate(x.reshape(x.shape[0], x.shape[1] // head, head), angles, rotary, neox)
    assert_close(got, expected.reshape(x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head", "rotary"), [(64, 64), (128, 128), (64, 32), (80, 20), (32, 16), (96, 96)])
@pytest.mark.parametrize("tokens", [1, 13, 0])
def test_plain(device, dtype, neox, head, rotary, tokens):
    cache, angles = make_cache(rotary, dtype)
    positions = torch.randint(0, LENGTH, (tokens,))
    query, key = torch.randn(tokens, 6 * head).to(dtype), torch.randn(tokens, 2 * head).to(dtype)
    got = rope.rotary_embedding(
        positions.to(device), query.to(device), key.to(device), cache.to(device), head, rotary, neox
    )
    for result, x in zip(got, (query, key), strict=True):
        check(result, x, angles[positions], head, rotary, neox)


def test_parts_of_a_fused_projection(device):
    """Query and key arrive as strided parts of one tensor."""
    cache, angles = make_cache(64, torch.float32)
    both, positions = torch.randn(5, 8 * 64), torch.tensor([3, 0, 127, 9, 9])
    query, key, _ = both.to(device).split([256, 128, 128], dim=-1)
    got = rope.rotary_embedding(positions.to(device), query, key, cache.to(device), 64, 64, True)
    check(got[0], both[:, :256], angles[positions], 64, 64, True)
    check(got[1], both[:, 256:384], angles[positions], 64, 64, True)


def test_without_a_key(device):
    cache, angles = make_cache(64, torch.float32)
    positions, query = torch.arange(4), torch.randn(4, 128)
    got, nothing = rope.rotary_embedding(
        positions.to(device), query.to(device), None, cache.to(device), 64, 64, True
    )
    assert nothing is None
    check(got, query, angles[:4], 64, 64, True)


def test_equal_to_transformers(device):
    cache, angles = make_cache(64, torch.float32)
    positions = torch.tensor([0, 5, 77])
    query, key = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    full = torch.cat((angles[positions], angles[positions]), dim=-1).float()[None]
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], full.cos(), full.sin()
    )
    got = rope.rotary_embedding(
        positions.to(device),
        query.flatten(1).to(device),
        key.flatten(1).to(device),
        cache.to(device),
        64,
        64,
        True,
    )
    for result, want in zip(got, expected, strict=True):
        torch.testing.assert_close(result.cpu(), want[0].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


def axis_angles(positions: torch.Tensor, angles: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """The angle of each frequency at the position of its axis: [T, rotary_dim/2]."""
    return torch.stack([angles[positions[axis], i] for i, axis in enumerate(axes)], dim=-1)


def alternating(section: list[int]) -> list[int]:
    axes = [0] * sum(section)
    for axis in (1, 2):
        for i in range(section[axis]):
            axes[axis + 3 * i] = axis
    return axes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("section", "head", "interleaved"),
    [
        ([16, 24, 24], 128, False),
        ([8, 12, 12], 64, False),
        ([24, 20, 20], 128, True),
        ([12, 11, 9], 64, True),  # unequal height and width: composed
        ([4, 3, 3], 64, True),  # a part of the head, not a multiple of 16: composed
        ([4, 2, 2], 32, False),
    ],
)
def test_three_axes(device, dtype, neox, section, head, interleaved):
    rotary = 2 * sum(section)
    cache, angles = make_cache(rotary, dtype)
    positions = torch.randint(0, LENGTH, (3, 9))
    query, key = torch.randn(9, 4 * head).to(dtype), torch.randn(9, head).to(dtype)
    got = rope.mrope(
        positions.to(device),
        query.to(device),
        key.to(device),
        cache.to(device),
        head,
        rotary,
        section,
        neox,
        interleaved,
    )
    axes = alternating(section) if interleaved else [axis for axis in range(3) for _ in range(section[axis])]
    for result, x in zip(got, (query, key), strict=True):
        check(result, x, axis_angles(positions, angles, axes), head, rotary, neox)


@pytest.mark.parametrize(
    ("config", "module", "section", "interleaved"),
    [
        (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, [8, 12, 12], False),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [12, 10, 10], True),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [12, 11, 9], True),
    ],
)
def test_three_axes_equal_to_transformers(device, config, module, section, interleaved):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    theirs = module(config(hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=parameters))
    cache, _ = make_cache(64, torch.float32)
    positions = torch.randint(0, LENGTH, (3, 5))
    query, key = torch.randn(5, 2, 64), torch.randn(5, 1, 64)
    cos, sin = theirs(query, positions[:, None])
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    flat = [x.flatten(1).to(device) for x in (query, key)]
    got = rope.mrope(positions.to(device), *flat, cache.to(device), 64, 64, section, True, interleaved)
    for result, want in zip(got, expected, strict=True):
        torch.testing.assert_close(result.cpu(), want[0].transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-4)


def test_text_positions_through_mrope_are_plain_rope(device):
    cache, _ = make_cache(64, torch.float32)
    positions, query, key = (
        torch.arange(6).to(device),
        torch.randn(6, 128).to(device),
        torch.randn(6, 64).to(device),
    )
    plain = rope.rotary_embedding(positions, query, key, cache.to(device), 64, 64, True)
    section = [16, 8, 8]
    for given in (positions, positions.expand(3, -1)):
        got = rope.mrope(given, query, key, cache.to(device), 64, 64, section, True, False)
        torch.testing.assert_close(got, plain)


def test_sections_must_add_up(device):
    cache, _ = make_cache(64, torch.float32)
    x = torch.randn(1, 64, device=device)
    with pytest.raises(ValueError, match="sum 32"):
        rope.mrope(torch.zeros(3, 1, dtype=torch.long), x, x, cache, 64, 64, [16, 8, 7], True, False)
