import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import eager_attention_forward

from npufleet.kernels.ops import attention
from npufleet.kernels.reference import attention_math

from . import formulas
from .formulas import DTYPES, assert_close
from .paged import PagedCase, make_case

SCALE = 0.3
BATCHES = {
    "prefill": [(5, 5), (33, 33), (1, 1)],
    "decode": [(1, 1), (1, 16), (1, 17), (1, 40)],
    "chunk": [(7, 20), (16, 48), (3, 130)],
    "mixed": [(1, 31), (9, 9), (1, 1), (1, 200), (4, 36), (1, 33)],
    "one": [(1, 32)],
}


def run(case: PagedCase, device: torch.device, window: int | None = None, **more) -> torch.Tensor:
    return attention.paged_attention(
        *case.tensors(device), case.query_ends, case.kv_lens, scale=SCALE, sliding_window=window, **more
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 4, 16, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_paged_matches_the_formula(device, dtype, window, batch):
    case = make_case(BATCHES[batch], dtype=dtype)
    got = run(case, device, window)
    assert got.dtype == dtype
    assert_close(got, case.expected(SCALE, window))


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (8, 8), (9, 3), (12, 1), (64, 1)])
def test_grouped_heads(device, heads, key_heads):
    case = make_case(BATCHES["mixed"], heads=heads, key_heads=key_heads)
    assert_close(run(case, device), case.expected(SCALE))


@pytest.mark.parametrize("block", [16, 48, 128, 512])
def test_block_sizes(device, block):
    case = make_case([(1, 2 * block), (2, block), (1, block + 1), (3, 3)], block=block)
    assert_close(run(case, device), case.expected(SCALE))


def test_no_tokens(device):
    case = make_case([])
    assert run(case, device).shape == (0, 6, 16)


def test_a_request_without_tokens_and_a_padding_request(device):
    """A request may have no query in this step; a padding request has a query but no key and gets zeros."""
    case = make_case([(1, 5), (0, 9), (2, 4), (1, 0)])
    got = run(case, device).cpu()
    assert_close(got, case.expected(SCALE))
    assert torch.equal(got[-1], torch.zeros(6, 16))


def test_the_result_goes_where_told(device):
    case = make_case(BATCHES["mixed"])
    out = torch.full_like(case.query, 7.0).to(device)
    assert run(case, device, out=out) is out
    assert_close(out, case.expected(SCALE))


def test_the_caches_stay_as_they_are(device):
    case = make_case(BATCHES["mixed"])
    tensors = case.tensors(device)
    attention.paged_attention(*tensors, case.query_ends, case.kv_lens, scale=SCALE)
    for after, before in zip(
        tensors, (case.query, case.key_cache, case.value_cache, case.block_table), strict=True
    ):
        assert torch.equal(after.cpu(), before)


def test_a_window_must_be_positive(device):
    with pytest.raises(ValueError, match="sliding_window is 0"):
        run(make_case([(1, 3)]), device, 0)


def test_half_pages_of_one_pool(device):
    """The caches may be two overlapping contiguous views of one pool, addressed with doubled block ids."""
    case = make_case([(1, 40), (6, 20), (1, 16)])
    blocks = case.key_cache.shape[0]
    pool = torch.stack((case.key_cache, case.value_cache), dim=1).view(2 * blocks, *case.key_cache.shape[1:])
    pool = pool.to(device)
    got = attention.paged_attention(
        case.query.to(device),
        pool[:-1],
        pool[1:],
        (case.block_table * 2).to(device),
        case.query_ends,
        case.kv_lens,
        scale=SCALE,
    )
    assert_close(got, case.expected(SCALE))


def test_tiles_and_chunks_do_not_change_the_result(device, monkeypatch):
    """Long prefills run in tiles and big decode batches in parts; small limits make both happen here."""
    case = make_case([(40, 90), (1, 60), (1, 70), (1, 80), (50, 50)])
    for window in (None, 13):
        whole = run(case, device, window).cpu()
        with monkeypatch.context() as patch:
            patch.setattr(attention_math, "TILE", 7)
            patch.setattr(attention_math, "CHUNK", 1)
            torch.testing.assert_close(run(case, device, window).cpu(), whole)


def test_changed_lengths_and_tables_are_seen(device):
    """What is remembered from one call to the next must not outlive its arguments."""
    case = make_case([(1, 20), (1, 35)])
    query, keys, values, table = case.tensors(device)
    first = run(case, device)
    swapped = attention.paged_attention(
        query, keys, values, table.flip(0).contiguous(), [1, 2], [20, 20], scale=SCALE
    )
    expected = formulas.attention(
        case.query, [case.keys[1][:20], case.keys[0]], [case.values[1][:20], case.values[0]], [1, 1], SCALE
    )
    assert_close(swapped, expected)
    assert torch.equal(run(case, device).cpu(), first.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_packed_keys(device, dtype, causal, window):
    lengths = [(4, 4), (1, 9), (12, 30), (0, 3)]
    queries, counts = [q for q, _ in lengths], [k for _, k in lengths]
    query = torch.randn(sum(queries), 4, 16).to(dtype)
    key, value = torch.randn(sum(counts), 2, 16).to(dtype), torch.randn(sum(counts), 2, 16).to(dtype)
    got = attention.varlen_attention(
        query.to(device),
        key.to(device),
        value.to(device),
        torch.tensor(queries).cumsum(0).tolist(),
        torch.tensor(counts).cumsum(0).tolist(),
        causal=causal,
        scale=SCALE,
        sliding_window=window,
    )
    expected = formulas.attention(
        query, list(key.split(counts)), list(value.split(counts)), queries, SCALE, causal, window
    )
    assert_close(got, expected)


def test_attention_in_parts_is_attention_over_all(device):
    """Paged keys in two launches with their log-sum-exp; then more parts than the operator merges at once."""
    case = make_case([(1, 40), (3, 40)])
    query, keys, values, table = case.tensors(device)
    outs, lses = [], []
    for first, last in ((0, 16), (16, 40)):
        lse = torch.empty(*query.shape[:2], 1, device=device)
        call = attention.PagedAttentionCall(
            query=query,
            key_cache=keys,
            value_cache=values,
            block_table=table[:, first // 16 :].contiguous(),
            out=torch.empty_like(query),
            scale=SCALE,
            causal=False,
            lse=lse,
        )
        call.launch(case.query_ends, [last - first] * 2)
        outs.append(call.out)
        lses.append(lse.squeeze(-1))
    merged, total = attention.merge_attention(outs, lses)
    assert_close(merged, formulas.attention(case.query, case.keys, case.values, [1, 3], SCALE, False))
    again, sum_of_20 = attention.merge_attention([merged] * 20, [total] * 20)
    assert_close(again, merged.cpu().double())
    torch.testing.assert_close(sum_of_20, total + torch.tensor(20.0).log().item())


def test_new_tokens_and_earlier_ones_are_merged(device):
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    old_key, old_value = torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    here = [x.to(device) for x in (query, key, value)]
    new, new_lse = attention.varlen_attention_part(*here, [5], scale=SCALE)
    pages = torch.zeros(2, 1, 16, 2, 16)
    pages[0, 0, :9], pages[1, 0, :9] = old_key, old_value
    lse = torch.empty(5, 4, 1, device=device)
    call = attention.PagedAttentionCall(
        query=here[0],
        key_cache=pages[0].to(device),
        value_cache=pages[1].to(device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        out=torch.empty_like(here[0]),
        scale=SCALE,
        causal=False,
        lse=lse,
    )
    call.launch([5], [9])
    merged, _ = attention.merge_attention([new, call.out], [new_lse, lse.squeeze(-1)])
    whole = [torch.cat((old_key, key))], [torch.cat((old_value, value))]
    assert_close(merged, formulas.attention(query, *whole, [5], SCALE))


def test_packed_keys_with_smaller_values(device):
    query, key, value = torch.randn(6, 4, 32), torch.randn(6, 4, 32), torch.randn(6, 4, 16)
    got = attention.varlen_attention(
        query.to(device), key.to(device), value.to(device), [2, 6], [2, 6], causal=True, scale=SCALE
    )
    expected = formulas.attention(query, list(key.split([2, 4])), list(value.split([2, 4])), [2, 4], SCALE)
    assert_close(got, expected)


def test_packed_keys_refuse_a_window_without_causality(device):
    x = torch.zeros(1, 1, 16, device=device)
    with pytest.raises(ValueError, match="needs causal"):
        attention.varlen_attention(x, x, x, [1], [1], causal=False, scale=1.0, sliding_window=3)


def test_equal_to_transformers(device):
    """One whole prompt against the attention of transformers' Llama."""

    class Layer(torch.nn.Module):
        num_key_value_groups = 3

    case = make_case([(21, 21)], heads=9, key_heads=3, head=64, block=128)
    mask = torch.full((21, 21), float("-inf")).triu_(1)
    states = (x.transpose(0, 1)[None] for x in (case.query, case.keys[0], case.values[0]))
    expected, _ = eager_attention_forward(Layer().eval(), *states, mask[None, None], SCALE)
    torch.testing.assert_close(run(case, device).cpu(), expected[0], rtol=1e-5, atol=1e-5)


request_shapes = st.integers(1, 70).flatmap(
    lambda keys: st.tuples(st.one_of(st.just(1), st.integers(1, keys)), st.just(keys))
)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(request_shapes, min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 80)),
    groups=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]),
    block=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch(device, requests, window, groups, block, dtype):
    case = make_case(requests, heads=groups[0], key_heads=groups[1], head=16, block=block, dtype=dtype)
    assert_close(run(case, device, window), case.expected(SCALE, window))
