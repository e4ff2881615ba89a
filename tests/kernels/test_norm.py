import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from npufleet.kernels.ops import norm

from . import formulas
from .formulas import DTYPES, assert_close

SHAPES = [(1, 8), (5, 576), (3, 7), (24, 1000), (2, 3, 64), (0, 576)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_the_formula(device, dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    got = norm.rms_norm(x.to(device), weight.to(device), 1e-5)
    assert got.dtype == dtype and got.device == device
    assert_close(got, formulas.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_returns_the_sum_too(device, dtype, shape):
    x, residual, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )
    on_device = x.to(device), residual.to(device)
    normed, total = norm.add_rms_norm(*on_device, weight.to(device), 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    assert_close(normed, formulas.rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(on_device[0].cpu(), x) and torch.equal(on_device[1].cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gemma_norms_add_one_to_the_weight(device, dtype, shape):
    x, residual, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )
    got = norm.gemma_rms_norm(x.to(device), weight.to(device), 1e-6)
    assert_close(got, formulas.rms_norm(x, weight.double() + 1, 1e-6))
    normed, total = norm.gemma_add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    assert_close(normed, formulas.rms_norm(x + residual, weight.double() + 1, 1e-6))


def test_the_epsilon_counts(device):
    x, weight = torch.full((1, 4), 1e-3), torch.ones(4)
    assert_close(norm.rms_norm(x.to(device), weight.to(device), 1e-6), formulas.rms_norm(x, weight, 1e-6))
    assert_close(norm.rms_norm(x.to(device), weight.to(device), 1.0), formulas.rms_norm(x, weight, 1.0))


def test_large_values_do_not_overflow_in_half_precision(device):
    x, weight = torch.full((2, 64), 3e4, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert_close(norm.rms_norm(x.to(device), weight.to(device), 1e-6), torch.ones(2, 64, dtype=torch.float64))


@pytest.mark.parametrize(
    ("module", "op"), [(LlamaRMSNorm, norm.rms_norm), (GemmaRMSNorm, norm.gemma_rms_norm)]
)
def test_equal_to_transformers(device, module, op):
    layer = module(96, eps=1e-5)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(7, 96)
    got = op(x.to(device), layer.weight.detach().to(device), 1e-5)
    torch.testing.assert_close(got.cpu(), layer(x).detach())
