import pytest
import torch
import torch.nn.functional as F

from npufleet.kernels.ops import activation

from .formulas import DTYPES, assert_close

SHAPES = [(1, 2), (24, 3072), (3, 14), (2, 3, 1024), (5, 1056), (0, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul(device, dtype, shape):
    x = torch.randn(shape).to(dtype)
    gate, value = x.double().chunk(2, dim=-1)
    assert_close(activation.silu_and_mul(x.to(device)), gate / (1 + torch.exp(-gate)) * value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(device, dtype, shape, approximate):
    x = torch.randn(shape).to(dtype)
    gate, value = x.double().chunk(2, dim=-1)
    if approximate == "none":
        expected = gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * value
    else:
        expected = gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * value
    assert_close(activation.gelu_and_mul(x.to(device), approximate), expected)


def test_unknown_gelu_is_refused(device):
    with pytest.raises(ValueError, match="approximate is 'fast'"):
        activation.gelu_and_mul(torch.ones(1, 32, device=device), "fast")


def test_the_two_gelu_paths_agree(device):
    """The fused operator up to its limit and the composition beyond it are the same function."""
    narrow = torch.randn(4, activation.GELU_MUL_LIMIT)
    wide = torch.cat((narrow[:, :512], torch.zeros(4, 16), narrow[:, 512:], torch.zeros(4, 16)), dim=-1)
    fused = activation.gelu_and_mul(narrow.to(device)).cpu()
    composed = activation.gelu_and_mul(wide.to(device)).cpu()[:, :512]
    torch.testing.assert_close(fused, composed)
    torch.testing.assert_close(fused, F.gelu(narrow[:, :512]) * narrow[:, 512:])
