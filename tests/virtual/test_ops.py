"""ATen operations on npu tensors equal the CPU's bit for bit, and land on the device."""

import pytest
import torch
import torch.nn.functional as F

M = torch.tensor([[True, False, True], [False, True, True]])


def data(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {
        "a": torch.randn(4, 6, generator=g).to(dtype),
        "b": torch.randn(4, 6, generator=g).to(dtype),
        "w": torch.randn(6, 6, generator=g).to(dtype),
        "q": torch.randn(2, 3, 5, 8, generator=g).to(dtype),
        "i": torch.tensor([3, 0, 2, 2]),
        "m": torch.rand(4, 6, generator=g) > 0.5,
        "n": torch.randint(-9, 9, (4, 6), generator=g),
        "e": torch.empty(0, 6, dtype=dtype),
    }


FUNCTIONAL = {
    "arithmetic": lambda a, b, **_: (a * 2 + b - 1) / (b.abs() + 1),
    "mixed types": lambda a, n, **_: a + n,
    "wrapped number": lambda n, **_: n * 2.5,
    "integer": lambda n, **_: (n // 2, n % 3, n << 1, n & 6, -n),
    "compare": lambda a, b, **_: (a > b, a == a, torch.isnan(a), torch.maximum(a, b)),
    "where": lambda a, b, m, **_: torch.where(m, a, b),
    "mm": lambda a, w, **_: a @ w,
    "addmm": lambda a, b, w, **_: torch.addmm(b, a, w),
    "bmm": lambda q, **_: torch.bmm(q[0], q[1].transpose(-1, -2)),
    "linear": lambda a, w, **_: F.linear(a, w, w[0]),
    "einsum": lambda q, **_: torch.einsum("bhqd,bhkd->bhqk", q, q),
    "attention": lambda q, **_: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "softmax": lambda a, **_: (a.softmax(-1), a.log_softmax(0), a.softmax(-1, dtype=torch.float32)),
    "norms": lambda a, w, **_: (F.layer_norm(a, (6,), w[0], w[1]), a.norm(), F.normalize(a)),
    "activations": lambda a, **_: (F.silu(a), F.gelu(a, approximate="tanh"), a.sigmoid(), a.tanh(), a.relu()),
    "reduce": lambda a, **_: (a.sum(), a.mean(-1), a.amax(0), a.var(), a.argmax(-1), a.prod(1)),
    "cumulative": lambda a, n, **_: (a.cumsum(0), n.cumsum(1), a.cummax(1).values),
    "sort": lambda a, **_: (*a.sort(-1), *a.topk(3), a.argsort(0)),
    "embedding": lambda i, w, **_: F.embedding(i, w),
    "index": lambda a, i, m, **_: (
        a[i],
        a[:, i],
        a[m],
        a[i, i],
        a.index_select(0, i),
        a.take_along_dim(i[:, None], 1),
    ),
    "gather": lambda a, i, **_: (a.gather(1, i[:, None]), torch.zeros_like(a).scatter(1, i[:, None], 1.0)),
    "index_put": lambda a, i, **_: a.clone().index_put_((i,), a[0], accumulate=True),
    "index_add": lambda a, i, b, **_: a.index_add(0, i, b),
    "join": lambda a, b, **_: (torch.cat([a, b]), torch.stack([a, b]), torch.cat([a, a[:0]])),
    "split": lambda a, **_: (*a.split(2), *a.chunk(3, -1), *a.unbind(0), *torch.tensor_split(a, 2)),
    "views": lambda a, q, **_: (
        a.t(),
        a.view(2, 12),
        a[1:, ::2],
        q.permute(0, 2, 1, 3).flatten(2),
        a.expand(2, 4, 6),
    ),
    "copies": lambda a, **_: (
        a.t().contiguous(),
        a.clone(),
        a.reshape(3, 8),
        a.flip(0),
        a.roll(1, 0),
        a.repeat(2, 1),
    ),
    "casts": lambda a, **_: (a.half(), a.bfloat16(), a.int(), a.bool(), a.double(), a.to(torch.int8)),
    "unique": lambda n, **_: torch.unique(n, return_inverse=True, return_counts=True),
    "nonzero": lambda m, **_: (m.nonzero(), *torch.where(m), m.any(), m.all(1)),
    "repeat_interleave": lambda i, a, **_: (a.repeat_interleave(2, 0), torch.repeat_interleave(i, i)),
    "one_hot": lambda i, **_: F.one_hot(i, 5),
    "masks": lambda a, m, **_: (a.masked_fill(m, -1.0), a.masked_select(m), a.triu(1), a.tril()),
    "clamp": lambda a, **_: (a.clamp(-1, 1), a.clamp_min(0), a.round(), a.floor(), a.nan_to_num()),
    "complex": lambda a, **_: torch.view_as_real(torch.view_as_complex(a.float().view(4, 3, 2)) * (1 + 2j)),
    "conj": lambda a, **_: torch.view_as_complex(a.float().view(4, 3, 2)).conj() * 2,
    "foreach": lambda a, b, **_: tuple(torch._foreach_add([a, b], 1)),
    "pad": lambda a, **_: (F.pad(a, (1, 2)), F.pad(a[None], (1, 1), mode="reflect")),
    "conv": lambda a, **_: F.conv1d(a[None], a[:, :3].expand(4, 4, 3), padding=1),
    "bincount": lambda i, **_: torch.bincount(i, minlength=6),
    "searchsorted": lambda a, **_: torch.searchsorted(a.float().sort(-1).values, a.float()),
    "empty": lambda e, w, **_: (e @ w, e.sum(), torch.cat([e, e]), e + 1),
    "dist": lambda a, b, **_: torch.cdist(a.float(), b.float()),
    "like": lambda a, **_: (torch.zeros_like(a), torch.full_like(a, 3), a.new_ones(2), a.new_tensor([1, 2])),
}


def flat(value) -> list[torch.Tensor]:
    return [item for part in value for item in flat(part)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_results_equal_the_cpu(name, dtype):
    host = data(dtype)
    want = flat(FUNCTIONAL[name](**host))
    got = flat(FUNCTIONAL[name](**{key: value.npu() for key, value in host.items()}))
    assert len(got) == len(want)
    for there, here in zip(got, want, strict=True):
        assert there.device.type == "npu"
        assert there.dtype == here.dtype
        assert torch.equal(there.cpu(), here), name


def test_writes_in_place_reach_the_base_through_views():
    host = data()["a"]
    base = host.npu()
    view = base[1:3].t()
    assert view.add_(10) is view
    base.view(-1)[::5] = 0
    base[base > 10] *= 2
    want = host.clone()
    want[1:3].t().add_(10)
    want.view(-1)[::5] = 0
    want[want > 10] *= 2
    assert torch.equal(base.cpu(), want)
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_out_arguments_keep_identity_and_are_resized():
    a, b = data()["a"].npu(), data()["b"].npu()
    right, wrong = torch.empty(4, 6, device="npu"), torch.empty(0, device="npu")
    memory = right.data_ptr()
    assert torch.add(a, b, out=right) is right
    assert right.data_ptr() == memory
    torch.add(a, b, out=wrong)
    assert torch.equal(wrong.cpu(), right.cpu())


def test_views_share_memory_and_versions_count():
    x = torch.zeros(3, 4, device="npu")
    before = x._version
    x[1].fill_(5)
    assert x._version > before
    assert x.sum().item() == 20
    assert x.unfold(1, 2, 1).shape == (3, 3, 2)
    assert x.as_strided((2,), (1,)).data_ptr() == x.data_ptr()


def test_factories():
    for make in (
        lambda device: torch.zeros(3, device=device),
        lambda device: torch.ones(2, dtype=torch.bfloat16, device=device),
        lambda device: torch.full((2, 2), 7, device=device),
        lambda device: torch.arange(2, 9, 2, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([[1.5, 2]], device=device),
    ):
        there = make("npu")
        assert there.device == torch.device("npu", 0)
        assert torch.equal(there.cpu(), make("cpu"))


def test_device_as_a_context_reaches_results_but_not_references():
    with torch.device("npu"):
        import torch_npu

        x = torch.ones(2, 8)
        assert x.device.type == "npu"
        assert torch_npu.npu_rms_norm(x, torch.ones(8), 1e-6)[0].device.type == "npu"


def test_copies_between_host_and_device():
    host = torch.arange(12.0).view(3, 4)
    pinned = host.pin_memory()
    assert pinned.is_pinned() and not host.is_pinned()
    there = torch.empty(4, 3, device="npu")
    there.copy_(host.t())
    assert torch.equal(there.cpu(), host.t())
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), host)
    strided = torch.zeros(3, 8)
    strided[:, ::2].copy_(host.npu())
    assert torch.equal(strided[:, ::2], host)
    assert there[1, 2].item() == host.t()[1, 2].item()
    assert there.tolist() == host.t().tolist()


def test_random_numbers_follow_seed_generator_and_state():
    torch.npu.manual_seed(3)
    first = torch.rand(5, device="npu")
    second = torch.rand(5, device="npu")
    assert not torch.equal(first, second)
    torch.npu.manual_seed(3)
    assert torch.equal(torch.rand(5, device="npu"), first)
    state = torch.npu.get_rng_state()
    again = torch.rand(5, device="npu")
    assert torch.equal(again, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="npu"), again)
    own = torch.Generator(device="npu").manual_seed(9)
    draw = torch.empty(4, device="npu").exponential_(generator=own)
    assert torch.equal(torch.empty(4, device="npu").exponential_(generator=own.manual_seed(9)), draw)
    assert torch.randperm(50, device="npu").sort().values.tolist() == list(range(50))


def test_modules_and_gradients():
    torch.manual_seed(0)
    host = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )
    there = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )
    there.load_state_dict(host.state_dict())
    there = there.npu()
    x = data()["a"]
    want, got = host(x), there(x.npu())
    assert torch.equal(got.cpu(), want)
    want.sum().backward()
    got.sum().backward()
    for here, far in zip(host.parameters(), there.parameters(), strict=True):
        assert torch.allclose(far.grad.cpu(), here.grad, rtol=1e-6, atol=1e-6)


def test_tensors_of_two_devices_stay_where_they_are():
    x = torch.ones(3, device="npu:1")
    assert (x + 1).device == torch.device("npu", 1)
    assert x.to("npu:0").device == torch.device("npu", 0)
    assert torch.npu.current_device() == 0


def test_an_operation_without_a_reference_says_so():
    import torch_npu

    with pytest.raises(NotImplementedError, match="no reference kernel for npu::npu_fast_gelu"):
        torch_npu.npu_fast_gelu(torch.ones(8, device="npu"))
