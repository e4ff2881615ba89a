"""Latent attention: absorbed and expanded attention are the same mathematics, written a second time in float64."""

from dataclasses import replace

import pytest
import torch

from npufleet.kernels.ops import attention, mla

from .formulas import assert_close, rms_norm, rotate

DTYPES = (torch.float32, torch.bfloat16)
SCALE = 0.07
LATENT, ROPE, BLOCK = 512, 64, 128


def angles(tokens: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Angles [T, 32] and their cosines and sines [T, 64], each value twice."""
    turn = torch.rand(tokens, ROPE // 2, generator=random) * 6
    return turn, torch.cat((turn.cos(),) * 2, -1), torch.cat((turn.sin(),) * 2, -1)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours in the order of halves."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_norms_rotates_and_skips_padding(device, dtype):
    random = torch.Generator().manual_seed(1)
    kv = torch.randn(4, LATENT + ROPE, generator=random).to(dtype)
    gamma = torch.randn(LATENT, generator=random).to(dtype)
    turn, cos, sin = angles(4, random)
    slots = torch.tensor([130, -1, 0, 255])
    latents, ropes = torch.full((2, BLOCK, LATENT), 7.0), torch.full((2, BLOCK, ROPE), 7.0)
    latents, ropes = latents.to(device, dtype), ropes.to(device, dtype)
    given = [x.to(device, dtype) for x in (cos, sin)]
    written = mla.write_latents(
        kv.to(device), gamma.to(device), 1e-6, *given, slots.to(device), latents, ropes, output=True
    )
    assert written is not None
    latent = rms_norm(kv[:, :LATENT], gamma, 1e-6)
    rope = halves(rotate(kv[:, None, LATENT:], turn, ROPE, neox=False)[:, 0])
    assert_close(written[0], latent)
    tolerance = {"atol": 3e-2, "rtol": 3e-2} if dtype is torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(written[1].cpu().double(), rope, **tolerance)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(latents.view(-1, LATENT)[slot], written[0][token])
            assert torch.equal(ropes.view(-1, ROPE)[slot], written[1][token])
    untouched = torch.ones(2 * BLOCK, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (latents.view(-1, LATENT).cpu()[untouched] == 7).all()
    assert (ropes.view(-1, ROPE).cpu()[untouched] == 7).all()


def test_a_write_without_output_returns_nothing(device):
    caches = torch.zeros(1, BLOCK, LATENT, device=device), torch.zeros(1, BLOCK, ROPE, device=device)
    ones = torch.ones(2, ROPE, device=device)
    slots = torch.tensor([5, 6], device=device)
    kv, gamma = torch.randn(2, LATENT + ROPE, device=device), torch.ones(LATENT, device=device)
    assert mla.write_latents(kv, gamma, 1e-6, ones, ones, slots, *caches, output=False) is None
    assert caches[0][0, 5].abs().sum() > 0 and caches[1][0, 6].abs().sum() > 0


def test_queries_are_rotated_as_keys_are(device):
    """Products of rotated queries and keys are those of the interleaved rotation: the order of pairs cancels."""
    random = torch.Generator().manual_seed(2)
    query, key = torch.randn(3, 4, ROPE, generator=random), torch.randn(3, 4, ROPE, generator=random)
    turn, cos, sin = angles(3, random)
    got = [mla.rotate_query(x.to(device), cos.to(device), sin.to(device)).cpu() for x in (query, key)]
    assert_close(got[0], halves(rotate(query, turn, ROPE, neox=False)))
    expected = (rotate(query, turn, ROPE, False) * rotate(key, turn, ROPE, False)).sum(-1)
    assert_close((got[0] * got[1]).sum(-1), expected)


class Case:
    """A batch over paged latents; pages are shuffled and what lies outside holds rubbish."""

    def __init__(self, lengths: list[int], heads: int, dtype: torch.dtype, device: torch.device) -> None:
        random = torch.Generator().manual_seed(5)
        needed = [-(-n // BLOCK) for n in lengths]
        blocks = sum(needed) + 2
        order = torch.randperm(blocks, generator=random).tolist()
        self.lengths, self.heads = lengths, heads
        self.latents = [torch.randn(n, LATENT, generator=random).to(dtype) for n in lengths]
        self.ropes = [torch.randn(n, ROPE, generator=random).to(dtype) for n in lengths]
        latent_cache, rope_cache = (torch.full((blocks, BLOCK, n), 1e4).to(dtype) for n in (LATENT, ROPE))
        table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
        for request, length in enumerate(lengths):
            for place in range(length):
                if place % BLOCK == 0:
                    table[request, place // BLOCK] = order.pop()
                page = table[request, place // BLOCK]
                latent_cache[page, place % BLOCK] = self.latents[request][place]
                rope_cache[page, place % BLOCK] = self.ropes[request][place]
        self.query = torch.randn(len(lengths), heads, LATENT, generator=random).to(dtype)
        self.query_rope = torch.randn(len(lengths), heads, ROPE, generator=random).to(dtype)
        self.call = mla.LatentAttentionCall(
            query=self.query.to(device),
            query_rope=self.query_rope.to(device),
            latent_cache=latent_cache.to(device),
            rope_cache=rope_cache.to(device),
            block_table=table.to(device),
            out=torch.empty(len(lengths), heads, LATENT, dtype=dtype, device=device),
            scale=SCALE,
        )
        self.ends = list(range(1, len(lengths) + 1))

    def expected_lse(self, lengths: list[int]) -> torch.Tensor:
        """Float64 [T, heads, 1]: of the scaled scores over the first ``lengths`` tokens of each request."""
        rows = []
        for request, length in enumerate(lengths):
            latent, rope = self.latents[request][:length].double(), self.ropes[request][:length].double()
            scores = self.query[request].double() @ latent.T + self.query_rope[request].double() @ rope.T
            rows.append((scores * SCALE).logsumexp(-1, keepdim=True))
        return torch.stack(rows)

    def expected(self, lengths: list[int]) -> torch.Tensor:
        """Float64 [T, heads, 512], with the first ``lengths`` tokens of each request."""
        rows = []
        for request, length in enumerate(lengths):
            latent, rope = self.latents[request][:length].double(), self.ropes[request][:length].double()
            scores = self.query[request].double() @ latent.T + self.query_rope[request].double() @ rope.T
            rows.append((scores * SCALE).softmax(-1) @ latent)
        return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4, 128])
def test_absorbed_attention(device, dtype, heads):
    case = Case([1, 128, 129, 300], heads, dtype, device)
    case.call.launch(case.ends, case.lengths)
    assert_close(case.call.out, case.expected(case.lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_log_sum_exp_of_absorbed_attention(device, dtype):
    case = Case([1, 129], 4, dtype, device)
    lse = torch.empty(2, 4, 1, device=device)
    call = replace(case.call, lse=lse)
    assert call.kind != case.call.kind
    call.launch(case.ends, case.lengths)
    assert_close(call.out, case.expected(case.lengths))
    torch.testing.assert_close(lse.cpu().double(), case.expected_lse(case.lengths), atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("want_lse", [False, True])
def test_replays_follow_new_lengths(device, want_lse):
    case = Case([200, 130, 257], 4, torch.float32, device)
    lse = torch.zeros(3, 4, 1, device=device) if want_lse else None
    call = replace(case.call, lse=lse)
    call.launch(case.ends, case.lengths)
    call = replace(call, workspace=call.get_workspace(case.ends, case.lengths))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = call.capture(torch.npu.current_stream(), case.ends, case.lengths)
        doubled = call.out * 2
    for lengths in ([200, 130, 257], [1, 2, 3], [128, 129, 1]):
        captured.update(torch.npu.Stream(), case.ends, lengths)
        graph.replay()
        torch.npu.synchronize()
        assert_close(doubled, case.expected(lengths) * 2)
        if lse is not None:
            torch.testing.assert_close(lse.cpu().double(), case.expected_lse(lengths), atol=1e-4, rtol=1e-4)
    assert attention.CapturedAttention is type(captured)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_attention_in_parts_is_attention_over_all(device, dtype):
    """New tokens causally, earlier ones in two pieces, merged by their log-sum-exp."""
    random = torch.Generator().manual_seed(9)
    new, earlier, heads = 5, 9, 3
    query = torch.randn(new, heads, 192, generator=random).to(dtype)
    key = torch.randn(earlier + new, heads, 192, generator=random).to(dtype)
    value = torch.randn(earlier + new, heads, 128, generator=random).to(dtype)
    on = [x.to(device) for x in (query, key, value)]
    outs, lses = [], []
    for first, last in ((0, 4), (4, earlier), (earlier, earlier + new)):
        out, lse = mla.expanded_attention(
            on[0],
            on[1][first:last],
            on[2][first:last],
            [new],
            [last - first],
            causal=first == earlier,
            scale=SCALE,
            want_lse=True,
        )
        assert lse is not None
        outs.append(out)
        lses.append(lse)
    merged, total = attention.merge_attention(outs, lses)
    scores = torch.einsum("tnd,snd->nts", query.double(), key.double()) * SCALE
    scores += torch.full((new, earlier + new), float("-inf"), dtype=torch.float64).triu_(earlier + 1)
    assert_close(merged, torch.einsum("nts,snd->tnd", scores.softmax(-1), value.double()))
    torch.testing.assert_close(total.cpu().double(), scores.logsumexp(-1).T, atol=2e-2, rtol=1e-3)


def test_gathered_tokens_are_those_of_the_pages(device):
    case = Case([300, 140, 64], 1, torch.float32, device)
    starts, lengths = [128, 0, 0], [172, 140, 1]
    packed = mla.gather_latents(
        case.call.latent_cache,
        case.call.rope_cache,
        case.call.block_table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        sum(lengths),
    )
    for got, of in zip(packed, (case.latents, case.ropes), strict=True):
        expected = [x[s : s + n] for x, s, n in zip(of, starts, lengths, strict=True)]
        assert torch.equal(got.cpu(), torch.cat(expected))


@pytest.mark.parametrize(("heads", "inner", "outer"), [(4, 128, 512), (128, 512, 128), (2, 64, 128)])
def test_per_head_products(device, heads, inner, outer):
    """With one operator where it fits, and composed where it does not (too many rows of weights, odd sizes)."""
    x, weight = torch.randn(3, heads, inner), torch.randn(heads, inner, outer)
    got = mla.per_head_matmul(x.to(device), weight.to(device))
    expected = torch.einsum("tnk,nkm->tnm", x.double(), weight.double())
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-3, rtol=1e-4)
    assert got.is_contiguous()


def test_padded_heads():
    assert [mla.padded_heads(n) for n in (1, 3, 40, 64, 128)] == [1, 4, 64, 64, 128]
    with pytest.raises(ValueError, match=r"129 query heads.*128.*tensor_parallel_size"):
        mla.padded_heads(129)
