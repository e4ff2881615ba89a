"""The compiled kernels against the Python references: the same call on npu tensors and on CPU tensors."""

import pytest
import torch
import torch_npu

from npufleet.kernels.ops.attention import causal_mask
from npufleet.kernels.virtual import counters

from ..kernels.paged import PagedCase, make_case

DTYPES = (torch.float32, torch.bfloat16)


def on_npu(value):
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [on_npu(item) for item in value]
    return value.npu() if isinstance(value, torch.Tensor) else value


def compare(op, *args, fast=True, atol=None, **kwargs):
    """Run on both; the results must agree, and the compiled kernel must have been used, or not."""
    want = op(*args, **kwargs)
    counters.reset()
    got = op(*map(on_npu, args), **{name: on_npu(value) for name, value in kwargs.items()})
    assert bool(counters.read().fast) is fast
    for one, other in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        one = one.cpu()
        assert one.dtype == other.dtype and one.shape == other.shape
        rough = atol is not None and one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, **({"atol": atol, "rtol": 2e-2} if rough else {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 576), (2, 3, 33), (300, 64)])
def test_norms(shape, dtype):
    x, y, gamma = (torch.randn(size, dtype=dtype) for size in (shape, shape, shape[-1:]))
    compare(torch.ops.npu.npu_rms_norm, x, gamma, 1e-5)
    compare(torch.ops.npu.npu_add_rms_norm, x, y, gamma, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 34), (2, 3, 1536), (130, 512)])
def test_gated_activation(shape, dtype):
    compare(torch.ops.npu.npu_swiglu, 4 * torch.randn(shape, dtype=dtype))
    compare(torch.ops.npu.npu_swiglu, torch.tensor([[-1e30, -90.0, 90.0, 1e30, 1, 1, 1, 1]], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("head", "rotary"), [(32, 32), (64, 32), (96, 64)])
def test_rotary_embedding(mode, head, rotary, dtype):
    whole = torch.randn(9, 5 * head, dtype=dtype)
    query, key = whole.split([3 * head, 2 * head], dim=-1)  # rows with gaps, as a model's are
    cache, positions = torch.randn(40, rotary, dtype=dtype), torch.randint(0, 40, (9,))
    compare(torch.ops.npu.npu_mrope, positions, query, key, cache, head, rotary_mode=mode)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write(dtype):
    key, value = torch.randn(6, 2, 16, dtype=dtype), torch.randn(6, 2, 16, dtype=dtype)
    caches = [torch.zeros(4, 16, 2, 16, dtype=dtype) for _ in range(2)]
    slots = torch.tensor([3, -1, 63, 17, 0, 16], dtype=torch.int32)
    mine = [cache.npu() for cache in caches]
    counters.reset()
    torch.ops.npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *mine, slots.npu(), cache_mode="Norm")
    assert counters.read().fast == {"npu::npu_scatter_pa_kv_cache": 1}
    torch.ops.npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm")
    for one, other in zip(mine, caches, strict=True):
        assert torch.equal(one.cpu(), other)


def attention(case: PagedCase, window: int | None, **changes):
    blocks, block, kv_heads, _ = case.key_cache.shape
    sparse = (
        {"sparse_mode": 3}
        if window is None
        else {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    )
    arguments = {
        "actual_seq_lengths": case.query_ends,
        "actual_seq_lengths_kv": case.kv_lens,
        "block_table": case.block_table,
        "block_size": block,
        "input_layout": "TND",
        "num_heads": case.query.shape[1],
        "num_key_value_heads": kv_heads,
        "scale": 0.3,
        "atten_mask": causal_mask(torch.device("cpu")),
        **sparse,
        **changes,
    }
    pages = [cache.view(blocks, block, -1) for cache in (case.key_cache, case.value_cache)]
    return (case.query, *pages), arguments


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize(
    "requests",
    [[(1, 1)], [(1, 17), (1, 40), (1, 3)], [(2, 2), (1, 33), (8, 30)], [(0, 4), (1, 9)], [(1, 0), (1, 5)]],
)
def test_decode_attention(requests, window, dtype):
    tensors, arguments = attention(make_case(requests, dtype=dtype), window)
    # With several queries the reference rounds probabilities before it divides by their sum.
    compare(torch_npu.npu_fused_infer_attention_score, *tensors, atol=1e-2, **arguments)


def test_long_prompts_are_left_to_the_reference():
    tensors, arguments = attention(make_case([(9, 9), (1, 4)]), None)
    compare(torch_npu.npu_fused_infer_attention_score, *tensors, fast=False, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_seq_lengths": [1, 3]}, "ends at 3"),
        ({"actual_seq_lengths_kv": [17, 1000]}, "columns"),
        ({"block_table": torch.full((2, 4), 99, dtype=torch.int32)}, "block outside"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)}, "above the diagonal"),
        ({"input_layout": "BSH"}, "BSH"),
        ({"softmax_lse_flag": 1, "actual_seq_lengths_kv": [0, 17]}, "log-sum-exp"),
    ],
)
def test_wrong_calls_reach_the_reference(changes, message):
    tensors, arguments = attention(make_case([(1, 17), (1, 20)]), None, **changes)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        torch_npu.npu_fused_infer_attention_score(
            *map(on_npu, tensors), **{name: on_npu(value) for name, value in arguments.items()}
        )
