import pytest
import torch

from npufleet.kernels.ops import sampling

from . import formulas
from .formulas import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_p", [True, False])
@pytest.mark.parametrize("use_k", [True, False])
def test_top_k_top_p_keeps_what_the_formula_keeps(device, dtype, use_p, use_k):
    logits = (torch.randn(6, 500) * 4).to(dtype)
    p = torch.tensor([0.1, 0.5, 0.9, 0.95, 1.0, 0.0]).to(dtype) if use_p else None
    k = torch.tensor([1, 3, 50, 499, 500, 10]) if use_k else None
    got = sampling.top_k_top_p(
        logits.to(device), None if p is None else p.to(device), None if k is None else k.to(device)
    ).cpu()
    assert got.dtype == dtype
    for row in range(6):
        kept = got[row] > float("-inf")
        expected = formulas.top_k_top_p(
            logits[row], None if p is None else float(p[row]), None if k is None else int(k[row])
        )
        assert kept.tolist() == expected
        assert torch.equal(got[row][kept], logits[row][kept])


def test_one_logit_always_stays(device):
    logits = torch.randn(2, 8, device=device)
    got = sampling.top_k_top_p(logits, torch.zeros(2, device=device), None)
    assert (got > float("-inf")).sum(-1).tolist() == [1, 1]


def test_ties_with_the_k_th_stay(device):
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]], device=device)
    got = sampling.top_k_top_p(logits, None, torch.tensor([2], device=device))
    assert got.cpu().isfinite().tolist() == [[True, True, True, False]]


def test_no_filter_returns_the_logits(device):
    logits = torch.randn(2, 8, device=device)
    assert sampling.top_k_top_p(logits, None, None) is logits


def test_an_empty_batch(device):
    k = torch.empty(0, dtype=torch.int32, device=device)
    assert sampling.top_k_top_p(torch.empty(0, 9, device=device), None, k).shape == (0, 9)
