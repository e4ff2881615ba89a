"""What the references refuse: each wrong input on its own, by the name of what is wrong."""

import re
from typing import Any

import pytest
import torch

from npufleet.kernels.reference import KERNELS

MASK = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)
V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    return KERNELS[name](*args, **kwargs)


def paged(**changes: Any) -> dict[str, Any]:
    """A right call of the fused attention over pages, with some arguments changed."""
    right = {
        "query": torch.randn(3, 4, 16),
        "key": torch.randn(5, 16, 32),
        "value": torch.randn(5, 16, 32),
        "atten_mask": MASK,
        "actual_seq_lengths": [1, 3],
        "actual_seq_lengths_kv": [20, 7],
        "block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        "block_size": 16,
        "input_layout": "TND",
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "sparse_mode": 3,
    }
    return {**right, **changes}


def attend(name: str = V1, **changes: Any) -> Any:
    arguments = paged(**changes)
    tensors = [arguments.pop(x) for x in ("query", "key", "value")]
    return KERNELS[name](*tensors, **arguments)


def test_the_right_attention_calls_pass():
    assert attend()[0].shape == (3, 4, 16)
    assert attend(sparse_mode=4, pre_tokens=3, next_tokens=0)[0].shape == (3, 4, 16)
    assert attend(softmax_lse_flag=True)[1].shape == (3, 4, 1)


WRONG_ATTENTION = {
    "another dtype of key": ({"key": torch.randn(5, 16, 32).bfloat16()}, "key is torch.bfloat16"),
    "integers": ({"query": torch.ones(3, 4, 16, dtype=torch.int8)}, "query is torch.int8"),
    "strided pages": ({"key": torch.randn(5, 32, 32)[:, ::2]}, "key is not contiguous"),
    "strided query": ({"query": torch.randn(3, 8, 16)[:, ::2]}, "query is not contiguous"),
    "pages with heads": ({"key": torch.randn(5, 16, 2, 16)}, "the only page layout"),
    "another head size": ({"key": torch.randn(5, 16, 64)}, "head size of key is 32"),
    "another number of heads": ({"num_heads": 8}, "num_heads=8"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3"),
    "a head size off the grid": (
        {"query": torch.randn(3, 4, 8), "key": torch.randn(5, 16, 16), "value": torch.randn(5, 16, 16)},
        "head size of query is 8",
    ),
    "a value size off the grid": ({"value": torch.randn(5, 16, 16)}, "head size of value is 8"),
    "an odd block size": ({"block_size": 15}, "block_size is 15"),
    "a block size that is not the page's": ({"block_size": 32}, "must be [5, 32"),
    "a long block table": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
        "block_table is torch.int64",
    ),
    "a strided block table": (
        {"block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
        "block_table is not contiguous",
    ),
    "a block table of fewer requests": (
        {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
        "1 rows for 2",
    ),
    "a narrow block table": ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "needs 2 blocks"),
    "a block that does not exist": (
        {"block_table": torch.tensor([[0, 5], [2, 0]], dtype=torch.int32)},
        "a block outside 0 … 4",
    ),
    "a negative block": (
        {"block_table": torch.tensor([[0, 1], [-1, 0]], dtype=torch.int32)},
        "a block outside 0 … 4",
    ),
    "queries that end early": ({"actual_seq_lengths": [1, 2]}, "ends at 2, not at 3"),
    "queries that end late": ({"actual_seq_lengths": [1, 4]}, "ends at 4, not at 3"),
    "falling ends": ({"actual_seq_lengths": [4, 3]}, "must not fall"),
    "a negative length": ({"actual_seq_lengths_kv": [20, -7]}, "holds a negative number"),
    "no query lengths": ({"actual_seq_lengths": None}, "actual_seq_lengths is None"),
    "no key lengths": ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is None"),
    "fewer key lengths": ({"actual_seq_lengths_kv": [20]}, "2 query lengths but 1 key lengths"),
    "more queries than keys": ({"actual_seq_lengths_kv": [20, 1]}, "request 1 has 2 queries but only 1 keys"),
    "no mask": ({"atten_mask": None}, "atten_mask is None"),
    "a small mask": ({"atten_mask": MASK[:16, :16].contiguous()}, "must be 2048 × 2048"),
    "a float mask": ({"atten_mask": MASK.float()}, "atten_mask is torch.float32"),
    "a lower triangle": ({"atten_mask": MASK.t().contiguous()}, "1 above the diagonal"),
    "an empty mask": ({"atten_mask": torch.zeros_like(MASK)}, "1 above the diagonal"),
    "a negative window": ({"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 0}, "pre_tokens is -1"),
    "an undefined log-sum-exp": (
        {"actual_seq_lengths_kv": [0, 7], "softmax_lse_flag": True},
        "log-sum-exp is not defined",
    ),
    "another precision": ({"inner_precise": 2}, "inner_precise is 2"),
    "pages without a table": ({"block_table": None}, "block_size is given without block_table"),
}


@pytest.mark.parametrize("what", WRONG_ATTENTION)
def test_wrong_attention_is_refused(what):
    changes, message = WRONG_ATTENTION[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(**changes)


UNKNOWN_ATTENTION = {
    "input_layout": "BNSD",
    "sparse_mode": 2,
    "pse_shift": torch.zeros(1),
    "query_rope": torch.zeros(1),
    "key_rope": torch.zeros(1),
    "quant_scale2": torch.zeros(1),
    "antiquant_scale": torch.zeros(1),
    "key_antiquant_scale": torch.zeros(1),
    "key_antiquant_mode": 1,
    "query_padding_size": torch.zeros(1, dtype=torch.int64),
    "key_shared_prefix": torch.zeros(1),
    "actual_shared_prefix_len": [1],
}


@pytest.mark.parametrize("name", UNKNOWN_ATTENTION)
def test_attention_arguments_without_a_reference_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        attend(**{name: UNKNOWN_ATTENTION[name]})


def test_a_mask_in_sparse_mode_0_and_an_open_band_are_refused():
    with pytest.raises(NotImplementedError, match="atten_mask in sparse mode 0"):
        attend(sparse_mode=0)
    with pytest.raises(NotImplementedError, match="next_tokens=2147483647"):
        attend(sparse_mode=4, pre_tokens=3)


def v2_arguments(**changes: Any) -> dict[str, Any]:
    renamed = {
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
    }
    return {**{renamed.get(name, name): x for name, x in paged().items()}, **changes}


def test_version_2_computes_the_same_and_refuses_by_its_own_names():
    right = v2_arguments(return_softmax_lse=True)
    tensors = [right.pop(x) for x in ("query", "key", "value")]
    got = KERNELS[V2](*tensors, **right)
    old = paged(softmax_lse_flag=True)
    expected = KERNELS[V1](
        *tensors, **{name: x for name, x in old.items() if name not in ("query", "key", "value")}
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for name, given in (("learnable_sink", torch.zeros(4)), ("query_quant_mode", 3), ("out_dtype", 1)):
        with pytest.raises(NotImplementedError, match=name):
            KERNELS[V2](*tensors, **right, **{name: given})


def test_outputs_of_the_wrong_kind_are_refused():
    lse = torch.empty(1)
    for out, message in (
        (torch.empty(3, 4, 16).half(), "attention_out is torch.float16"),
        (torch.empty(4, 3, 16), "attention_out is (4, 3, 16)"),
        (torch.empty(3, 8, 16)[:, ::2], "attention_out is not contiguous"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            attend(f"{V1}.out", out=[out, lse])
    with pytest.raises(ValueError, match=r"workspace is torch\.float32"):
        attend(f"{V1}.out", out=[torch.empty(3, 4, 16), lse], workspace=torch.empty(4))


def cache_call(**changes: Any) -> dict[str, Any]:
    right = {
        "key": torch.randn(2, 3, 8),
        "value": torch.randn(2, 3, 8),
        "key_cache": torch.randn(4, 16, 3, 8),
        "value_cache": torch.randn(4, 16, 3, 8),
        "slots": torch.tensor([0, 63], dtype=torch.int32),
    }
    return {**right, **changes}


WRONG_CACHE = {
    "long slots": ({"slots": torch.tensor([0, 63])}, "slots is torch.int64"),
    "a slot beyond the end": ({"slots": torch.tensor([0, 64], dtype=torch.int32)}, "outside −1 … 63"),
    "a slot below −1": ({"slots": torch.tensor([0, -2], dtype=torch.int32)}, "outside −1 … 63"),
    "too few slots": ({"slots": torch.tensor([0], dtype=torch.int32)}, "slots (1,) must be [2]"),
    "another dtype of cache": ({"key_cache": torch.randn(4, 16, 3, 8).half()}, "key_cache is torch.float16"),
    "another head size": ({"value_cache": torch.randn(4, 16, 3, 9)}, "value_cache (4, 16, 3, 9)"),
    "a small block": ({"key_cache": torch.randn(4, 8, 3, 8)}, "block size is 8"),
    "caches of different length": ({"key_cache": torch.randn(5, 16, 3, 8)}, "differ in blocks"),
    "a strided key": ({"key": torch.randn(2, 6, 8)[:, ::2]}, "key is not contiguous"),
    "a strided cache": ({"key_cache": torch.randn(8, 16, 3, 8)[::2]}, "key_cache is not contiguous"),
    "flat keys": ({"key": torch.randn(2, 24)}, "key (2, 24) must be"),
    "fewer values": ({"value": torch.randn(1, 3, 8)}, "differ"),
}


@pytest.mark.parametrize("what", WRONG_CACHE)
def test_wrong_cache_writes_are_refused(what):
    changes, message = WRONG_CACHE[what]
    arguments = tuple(cache_call(**changes).values())
    for name, more in (
        ("npu::npu_scatter_pa_kv_cache", {"cache_mode": "Norm"}),
        ("atb::_npu_reshape_and_cache", {}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(name, *arguments, **more)


def test_other_cache_layouts_and_compression_have_no_reference():
    for more in ({}, {"cache_mode": "PA_NZ"}, {"cache_mode": "Norm", "seq_lens": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match=r"cache_mode|seq_lens"):
            call("npu::npu_scatter_pa_kv_cache", *cache_call().values(), **more)


def mrope_call(**changes: Any) -> dict[str, Any]:
    right = {
        "positions": torch.tensor([0, 9]),
        "query": torch.randn(2, 128),
        "key": torch.randn(2, 64),
        "cos_sin_cache": torch.randn(10, 64),
        "head_size": 64,
        "mrope_section": [0, 0, 0],
    }
    return {**right, **changes}


WRONG_ROPE = {
    "a position beyond the cache": ({"positions": torch.tensor([0, 10])}, "outside 0 … 9"),
    "a negative position": ({"positions": torch.tensor([0, -1])}, "outside 0 … 9"),
    "float positions": ({"positions": torch.tensor([0.0, 1.0])}, "positions is torch.float32"),
    "two axes": ({"positions": torch.zeros(2, 2, dtype=torch.long)}, "must be [tokens] or [3, tokens]"),
    "too few positions": ({"positions": torch.tensor([0])}, "query (2, 128) must be [1"),
    "half a head": ({"query": torch.randn(2, 96)}, "query (2, 96)"),
    "heads as a dimension": ({"query": torch.randn(2, 2, 64)}, "query has 3 dimensions"),
    "another dtype of key": ({"key": torch.randn(2, 64).half()}, "key is torch.float16"),
    "another dtype of cache": (
        {"cos_sin_cache": torch.randn(10, 64).half()},
        "cos_sin_cache is torch.float16",
    ),
    "an odd rotary size": ({"cos_sin_cache": torch.randn(10, 40)}, "multiple of 16"),
    "more than a head": ({"cos_sin_cache": torch.randn(10, 80)}, "exceeds the head size"),
    "sections without axes": ({"mrope_section": [16, 8, 8]}, "positions has one dimension"),
    "axes without sections": ({"positions": torch.zeros(3, 2, dtype=torch.long)}, "of sum 32"),
    "an unknown mode": ({"rotary_mode": "quarter"}, "rotary_mode is 'quarter'"),
    "an unknown cache mode": ({"cache_mode": "other"}, "cache_mode is 'other'"),
}


@pytest.mark.parametrize("what", WRONG_ROPE)
def test_wrong_rope_is_refused(what):
    changes, message = WRONG_ROPE[what]
    arguments = mrope_call(**changes)
    positional = [arguments.pop(x) for x in ("positions", "query", "key", "cos_sin_cache", "head_size")]
    with pytest.raises(ValueError, match=re.escape(message)):
        call("npu::npu_mrope", *positional, **arguments)


WRONG_OTHERS = [
    ("npu::npu_rms_norm", (torch.randn(2, 8), torch.randn(8).half()), "gamma is torch.float16"),
    ("npu::npu_rms_norm", (torch.randn(2, 8), torch.randn(9)), "gamma (9,)"),
    (
        "npu::npu_rms_norm",
        (torch.ones(2, 8, dtype=torch.int32), torch.ones(8, dtype=torch.int32)),
        "x is torch.int32",
    ),
    ("npu::npu_add_rms_norm", (torch.randn(2, 8), torch.randn(1, 8), torch.randn(8)), "x2 (1, 8)"),
    ("npu::npu_add_rms_norm", (torch.randn(2, 8), torch.randn(2, 8).half(), torch.randn(8)), "torch.float16"),
    ("npu::npu_gemma_rms_norm", (torch.randn(2, 16)[:, ::2], torch.randn(8)), "not contiguous"),
    ("npu::npu_swiglu", (torch.randn(2, 7),), "must be even"),
    ("npu::npu_swiglu", (torch.randn(2, 8), 2), "dim is 2"),
    ("npu::npu_gelu_mul", (torch.randn(2, 1026),), "at most 1024"),
    ("npu::npu_gelu_mul", (torch.randn(8),), "1 dimensions"),
    ("npu::npu_geglu", (torch.randn(2, 8), -1, 2), "approximate is 2"),
    ("npu::npu_rotary_mul", (torch.randn(2, 3, 8),) * 3, "must have 4"),
    (
        "npu::npu_rotary_mul",
        (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)),
        "broadcast",
    ),
    ("npu::npu_rotary_mul", (torch.randn(1, 2, 3, 7),) * 3, "must be even"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), None, None), "both None"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), None, torch.tensor([1, 2])), "k is torch.int64"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), None, torch.tensor([1, 9], dtype=torch.int32)), "[1, 8]"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), torch.tensor([0.5, 1.5]), None), "[0, 1]"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), torch.rand(2).half(), None), "p is torch.float16"),
    ("npu::npu_top_k_top_p", (torch.randn(2, 8), torch.rand(3), None), "must be [batch]"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG_OTHERS)
def test_other_wrong_calls_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(name, *arguments)


def test_a_rotate_matrix_has_no_reference():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="rotate"):
        call("npu::npu_rotary_mul", x, x, x, "half", torch.eye(8))
