"""What the references of latent attention refuse: each wrong input on its own, by the name of what is wrong."""

import re
from typing import Any

import pytest
import torch

from npufleet.kernels.reference import KERNELS

MASK = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)
V2 = "npu::npu_fused_infer_attention_score_v2"
PAGES = torch.randn(4, 128, 512)


def attend(name: str = V2, **changes: Any) -> Any:
    """A right call of attention over latents, with some arguments changed."""
    right: dict[str, Any] = {
        "query": torch.randn(2, 4, 512),
        "key": PAGES,
        "value": PAGES,
        "query_rope": torch.randn(2, 4, 64),
        "key_rope": torch.randn(4, 128, 64),
        "actual_seq_qlen": [1, 2],
        "actual_seq_kvlen": [130, 7],
        "block_table": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        "block_size": 128,
        "input_layout": "TND",
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "softmax_scale": 0.1,
    }
    right |= changes
    tensors = [right.pop(x) for x in ("query", "key", "value")]
    return KERNELS[name](*tensors, **right)


def test_right_calls_pass():
    assert attend()[0].shape == (2, 4, 512)
    several = {"actual_seq_qlen": [2], "actual_seq_kvlen": [9], "sparse_mode": 3, "atten_mask": MASK}
    several["block_table"] = torch.zeros(1, 1, dtype=torch.int32)
    assert attend(**several)[0].shape == (2, 4, 512)


def test_several_queries_of_a_request_see_no_later_key():
    """The first of two queries gives what it gives alone with one key less."""
    query, rope, key_rope = torch.randn(2, 4, 512), torch.randn(2, 4, 64), torch.randn(4, 128, 64)
    given = {"key_rope": key_rope, "block_table": torch.tensor([[3, 1]], dtype=torch.int32)}
    both = attend(
        query=query,
        query_rope=rope,
        actual_seq_qlen=[2],
        actual_seq_kvlen=[131],
        sparse_mode=3,
        atten_mask=MASK,
        **given,
    )[0]
    alone = attend(
        query=query[:1], query_rope=rope[:1], actual_seq_qlen=[1], actual_seq_kvlen=[130], **given
    )[0]
    torch.testing.assert_close(both[:1], alone)


WRONG_ATTENTION = {
    "three heads": (
        {
            "query": torch.randn(2, 3, 512),
            "query_rope": torch.randn(2, 3, 64),
            "num_query_heads": 3,
        },
        "num_query_heads is 3, with query_rope allowed are (1, 2, 4, 8, 16, 32, 64, 128)",
    ),
    "two key heads": ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    "heads not counted": ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "no rotary part of the keys": ({"key_rope": None}, "must be given together"),
    "no rotary part of the queries": ({"query_rope": None}, "must be given together"),
    "a wide rotary part": ({"query_rope": torch.randn(2, 4, 128)}, "query_rope (2, 4, 128)"),
    "another latent size": ({"query": torch.randn(2, 4, 256)}, "query (2, 4, 256)"),
    "pages of 256": (
        {"block_size": 256},
        "block_size is 256, with query_rope allowed are (16, 128)",
    ),
    "pages with heads": ({"key": PAGES.unsqueeze(2)}, "key (4, 128, 1, 512)"),
    "values of their own": ({"value": PAGES.clone()}, "value must be the key's memory"),
    "fewer rotary pages": ({"key_rope": torch.randn(3, 128, 64)}, "key_rope (3, 128, 64)"),
    "another dtype of rotary pages": (
        {"key_rope": torch.randn(4, 128, 64).half()},
        "key_rope is torch.float16",
    ),
    "strided queries": ({"query": torch.randn(2, 8, 512)[:, ::2]}, "query is not contiguous"),
    "strided pages": (
        {"key": torch.randn(4, 128, 576)[..., :512], "value": PAGES},
        "key is not contiguous",
    ),
    "no table": ({"block_table": None}, "block_table is None"),
    "a long table": ({"block_table": torch.zeros(2, 2).long()}, "block_table is torch.int64"),
    "a narrow table": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
        "block_table has 1 columns, 2 are needed",
    ),
    "a table of fewer requests": (
        {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
        "a row for each of 2 requests",
    ),
    "a block that does not exist": (
        {"block_table": torch.tensor([[1, 4], [3, 0]], dtype=torch.int32)},
        "a block outside 0 … 3",
    ),
    "queries that end early": ({"actual_seq_qlen": [1, 1]}, "must end at 2 tokens"),
    "a request without queries": (
        {"actual_seq_qlen": [0, 2]},
        "a request has [0, 2] queries, 1 to 16 are allowed",
    ),
    "a request without keys": ({"actual_seq_kvlen": [130, 0]}, "request 1 has 1 queries but only 0 keys"),
    "fewer key lengths": ({"actual_seq_kvlen": [130]}, "2 query lengths but 1 key lengths"),
    "a mask for single queries": ({"sparse_mode": 3, "atten_mask": MASK}, "sparse_mode must be 0"),
    "no queries": (
        {"query": torch.randn(0, 4, 512), "query_rope": torch.randn(0, 4, 64)},
        "query is empty",
    ),
}


@pytest.mark.parametrize("what", WRONG_ATTENTION)
def test_wrong_attention_over_latents_is_refused(what):
    changes, message = WRONG_ATTENTION[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_layout", "BNSD_NBSD"),
        ("learnable_sink", torch.zeros(4)),
        ("dequant_scale_key", torch.zeros(1)),
    ],
)
def test_arguments_without_a_reference_are_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=name):
        attend(**{name: value})


def test_the_given_log_sum_exp_must_fit():
    for lse, message in (
        (torch.empty(2, 4), "softmax_lse is (2, 4)"),
        (torch.empty(2, 4, 1).half(), "float16"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            attend(f"{V2}.out", out=[torch.empty(2, 4, 512), lse], return_softmax_lse=True)


def test_the_given_output_must_fit():
    for out, message in ((torch.empty(2, 4, 128), "attention_out is"), (torch.empty(2, 4, 512).half(), "is")):
        with pytest.raises(ValueError, match=message):
            attend(f"{V2}.out", out=[out, torch.empty(1)])


def write(**changes: Any) -> Any:
    right: dict[str, Any] = {
        "kv": torch.randn(2, 1, 1, 576),
        "gamma": torch.randn(512),
        "cos": torch.randn(2, 1, 1, 64),
        "sin": torch.randn(2, 1, 1, 64),
        "index": torch.tensor([3, -1]),
        "k_cache": torch.zeros(2, 128, 1, 64),
        "ckv_cache": torch.zeros(2, 128, 1, 512),
        "cache_mode": "PA",
    }
    return KERNELS["npu::npu_kv_rmsnorm_rope_cache"](**(right | changes))


WRONG_WRITES = {
    "short slots": ({"index": torch.tensor([3, -1], dtype=torch.int32)}, "index is torch.int32"),
    "a slot twice": ({"index": torch.tensor([3, 3])}, "an index comes twice"),
    "a slot beyond the end": ({"index": torch.tensor([3, 256])}, "above 255"),
    "a slot below −1": ({"index": torch.tensor([3, -2])}, "below −1"),
    "fewer slots": ({"index": torch.tensor([3])}, "index (1,) must be [2]"),
    "the caches swapped": (
        {"k_cache": torch.zeros(2, 128, 1, 512), "ckv_cache": torch.zeros(2, 128, 1, 64)},
        "k_cache (2, 128, 1, 512)",
    ),
    "pages without heads": ({"k_cache": torch.zeros(2, 128, 64)}, "k_cache (2, 128, 64)"),
    "a strided cache": ({"ckv_cache": torch.zeros(2, 128, 1, 576)[..., :512]}, "ckv_cache is not contiguous"),
    "another size": ({"kv": torch.randn(2, 1, 1, 320)}, "kv (2, 1, 1, 320)"),
    "a small norm": ({"gamma": torch.randn(64)}, "gamma (64,) must be [512]"),
    "half the angles": ({"cos": torch.randn(2, 1, 1, 32)}, "cos (2, 1, 1, 32)"),
    "angles of another token": ({"sin": torch.randn(1, 1, 1, 64)}, "sin (1, 1, 1, 64)"),
    "angles of another dtype": ({"sin": torch.randn(2, 1, 1, 64).half()}, "sin is torch.float16"),
}


@pytest.mark.parametrize("what", WRONG_WRITES)
def test_wrong_writes_are_refused(what):
    changes, message = WRONG_WRITES[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        write(**changes)


@pytest.mark.parametrize("changes", [{"cache_mode": "PA_NZ"}, {"c_kv_scale": torch.ones(512)}])
def test_other_caches_have_no_reference(changes):
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        write(**changes)


def test_what_was_not_asked_for_holds_no_values():
    *_, rope, latent = write()
    assert rope.isnan().all() and latent.isnan().all()
    *_, rope, latent = write(is_output_kv=True)
    assert rope.isfinite().all() and latent.isfinite().all()


PAIR = torch.randn(2, 128, 1, 512), torch.randn(2, 128, 1, 64)
TABLE = torch.tensor([[1, 0]], dtype=torch.int32)
NINE = torch.tensor([9], dtype=torch.int32)
OUT = torch.empty(9, 1, 512), torch.empty(9, 1, 64)
LSE, PART = torch.randn(6), torch.randn(6, 128)
WRONG_OTHERS = [
    ("npu_interleave_rope", (torch.randn(2, 4, 1, 32),) * 3, {}, "x (2, 4, 1, 32)"),
    (
        "npu_interleave_rope",
        (torch.randn(2, 4, 1, 64), torch.randn(2, 4, 1, 64), torch.randn(2, 4, 1, 64)),
        {},
        "cos (2, 4, 1, 64)",
    ),
    ("npu_gather_pa_kv_cache", (*PAIR, TABLE, NINE.long(), *OUT), {}, "seq_lens is torch.int64"),
    (
        "npu_gather_pa_kv_cache",
        (*PAIR, TABLE, NINE, *OUT),
        {"seq_offset": torch.tensor([64], dtype=torch.int32)},
        "seq_offset 64 is not a multiple of the block size 128",
    ),
    ("npu_gather_pa_kv_cache", (*PAIR, TABLE, NINE - 1, *OUT), {}, "must be [8, heads, d]"),
    ("npu_gather_pa_kv_cache", (*PAIR, TABLE + 2, NINE, *OUT), {}, "outside 0 … 1"),
    (
        "npu_gather_pa_kv_cache",
        (*PAIR, TABLE, NINE, *OUT),
        {"seq_offset": torch.tensor([256], dtype=torch.int32)},
        "too few columns",
    ),
    ("npu_attention_update", ([LSE], [PART, PART], 1), {}, "1 lse but 2 local_out"),
    ("npu_attention_update", ([LSE.half()], [PART], 1), {}, "lse is torch.float16"),
    ("npu_attention_update", ([LSE.view(2, 3)], [PART], 1), {}, "lse (2, 3) must be [6]"),
    ("npu_attention_update", ([LSE] * 17, [PART] * 17, 1), {}, "17 parts"),
    ("npu_attention_update", ([LSE], [PART], 2), {}, "update_type is 2"),
    (
        "npu_transpose_batchmatmul",
        (torch.randn(2, 3, 100), torch.randn(3, 100, 128)),
        {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]},
        "multiples of 128",
    ),
    (
        "npu_transpose_batchmatmul",
        (torch.randn(1, 128, 512), torch.randn(128, 512, 128)),
        {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]},
        "below 65,536",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "more", "message"), WRONG_OTHERS)
def test_other_wrong_calls_are_refused(name, arguments, more, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        KERNELS[f"npu::{name}"](*arguments, **more)


def test_the_merged_lse_holds_values_only_where_it_is_asked_for():
    update = KERNELS["npu::npu_attention_update"]
    assert update([LSE, LSE], [PART, PART], 0)[1].isnan().all()
    out, lse = update([LSE, LSE], [PART, PART], 1)
    torch.testing.assert_close(out, PART)
    torch.testing.assert_close(lse, LSE + torch.tensor(2.0).log())
