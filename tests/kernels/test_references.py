"""The references under their real names on CPU tensors, also where ops takes another form of the operator."""

import inspect

import pytest
import torch
import torch_npu  # noqa: F401  (declares the schemas)

from npufleet.kernels import reference

from . import formulas
from .formulas import DTYPES, assert_close
from .paged import make_case

SCALE = 0.3
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)


def overload(name: str) -> torch._ops.OpOverload:
    namespace, _, op = name.partition("::")
    packet, _, form = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), form or "default")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    reference.install()
    reference.install()  # again is free


@pytest.mark.parametrize("name", reference.KERNELS)
def test_every_reference_takes_the_arguments_of_its_schema(name):
    """Positional arguments in the order of the schema, keyword arguments by its names, the same defaults."""
    arguments = overload(name)._schema.arguments
    parameters = inspect.signature(reference.KERNELS[name]).parameters
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [a for a in arguments if not a.kwarg_only]
    assert len(positional) == len(expected)
    for ours, theirs in zip(positional, expected, strict=True):
        assert (ours.default is not ours.empty) == theirs.has_default_value(), ours.name
        assert not theirs.has_default_value() or ours.default == theirs.default_value, ours.name
    names = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    wanted = {a.name for a in arguments if a.kwarg_only}
    assert names <= wanted if open_ended else names == wanted


@pytest.mark.parametrize("name", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_every_attention_argument_is_known(name):
    """An argument that the reference neither computes nor refuses would be ignored."""
    from npufleet.kernels.reference import attention_arguments as known

    arguments = [a for a in overload(f"npu::{name}")._schema.arguments if a.kwarg_only]
    renamed = known.RENAMED if name == known.V2 else {}
    for argument in arguments:
        ours = renamed.get(argument.name, argument.name)
        defaults = known.DEFAULTS if ours in known.DEFAULTS else known.REFUSED[name]
        assert defaults[ours] == argument.default_value, argument.name
    assert len(arguments) == len(known.REFUSED[name]) + len(known.DEFAULTS)


def test_an_argument_beyond_the_schema_is_refused_by_name():
    x = torch.zeros(1, 1, 16)
    with pytest.raises(NotImplementedError, match="new_argument"):
        reference.KERNELS["npu::npu_fused_infer_attention_score"](x, x, x, new_argument=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
def test_the_log_sum_exp(dtype, window):
    """Single tokens, prompts and chunks: exp(lse) is the sum of the exponentials of the scaled scores."""
    case = make_case([(1, 40), (5, 5), (3, 20), (1, 1)], dtype=dtype)
    blocks, block = case.key_cache.shape[:2]
    sparse = {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0} if window else {"sparse_mode": 3}
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        case.query,
        case.key_cache.view(blocks, block, -1),
        case.value_cache.view(blocks, block, -1),
        atten_mask=MASK,
        actual_seq_lengths=case.query_ends,
        actual_seq_lengths_kv=case.kv_lens,
        block_table=case.block_table,
        block_size=block,
        input_layout="TND",
        num_heads=6,
        num_key_value_heads=2,
        scale=SCALE,
        softmax_lse_flag=True,
        **sparse,
    )
    assert_close(out, case.expected(SCALE, window))
    assert lse.shape == (case.query.shape[0], 6, 1) and lse.dtype == torch.float32
    row = 0
    for queries, keys, key in zip(case.query_lengths, case.kv_lens, case.keys, strict=True):
        for offset in range(queries):
            last = keys - queries + offset + 1
            first = max(0, last - window) if window else 0
            for head in range(6):
                scores = key[first:last, head // 3].double() @ case.query[row, head].double() * SCALE
                torch.testing.assert_close(
                    lse[row, head, 0].double(), scores.logsumexp(0), rtol=2e-3, atol=2e-3
                )
            row += 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("approximate", [0, 1])
def test_geglu_and_gelu(dtype, left, approximate):
    x = torch.randn(4, 6, 10).to(dtype)
    form = "tanh" if approximate else "none"
    for dim in (-1, 1):
        product, activated = torch.ops.npu.npu_geglu(x, dim, approximate, left)
        halves = x.double().chunk(2, dim=dim)
        gate, value = halves if left else halves[::-1]
        expected = torch.nn.functional.gelu(gate, approximate=form)
        assert_close(activated, expected)
        assert_close(product, expected * value)
    assert_close(
        torch.ops.npu.npu_gelu(x, approximate=form), torch.nn.functional.gelu(x.double(), approximate=form)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(dtype, mode):
    x, angles = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(5, 4, dtype=torch.float64)
    full = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, dim=-1)
    factors = (full.cos()[None, :, None].to(dtype), full.sin()[None, :, None].to(dtype))
    got = torch.ops.npu.npu_rotary_mul(x, *factors, mode)
    for batch in range(2):
        assert_close(got[batch], formulas.rotate(x[batch], angles, 8, mode == "half"))


def test_both_cache_writes_are_the_same():
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([5, -1, 40], dtype=torch.int32)
    first, second = torch.zeros(2, 3, 16, 2, 8), torch.zeros(2, 3, 16, 2, 8)
    torch.ops.npu.npu_scatter_pa_kv_cache(key, value, first[0], first[1], slots, cache_mode="Norm")
    torch.ops.atb._npu_reshape_and_cache(key, value, second[0], second[1], slots)
    assert torch.equal(first, second) and first.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.int32])
def test_dtype_cast_makes_a_new_tensor(dtype):
    x = torch.tensor([0, 1, 3], dtype=torch.int32)
    got = torch.ops.npu._npu_dtype_cast(x, dtype)
    assert torch.equal(got, x.to(dtype)) and got.data_ptr() != x.data_ptr()


META_CALLS = {
    "npu::npu_rms_norm": lambda: (torch.randn(3, 2, 8), torch.randn(2, 8)),
    "npu::npu_add_rms_norm": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)),
    "npu::npu_gemma_rms_norm": lambda: (torch.randn(3, 8).half(), torch.randn(8).half()),
    "npu::npu_swiglu": lambda: (torch.randn(3, 4, 8), 1),
    "npu::npu_gelu": lambda: (torch.randn(3, 8),),
    "npu::npu_gelu_mul": lambda: (torch.randn(3, 8).half(),),
    "npu::npu_geglu": lambda: (torch.randn(3, 4, 8), 1),
    "npu::npu_rotary_mul": lambda: (
        torch.randn(2, 3, 4, 8),
        torch.randn(1, 3, 1, 8),
        torch.randn(1, 3, 1, 8),
    ),
    "npu::npu_top_k_top_p": lambda: (torch.randn(2, 8), torch.rand(2), torch.ones(2, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", META_CALLS)
def test_results_have_the_shape_and_dtype_of_the_meta_kernel(name):
    arguments = META_CALLS[name]()
    real = overload(name)(*arguments)
    meta = overload(name)(*(x.to("meta") if torch.is_tensor(x) else x for x in arguments))
    for got, want in zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, meta)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
