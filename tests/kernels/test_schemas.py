"""Every operator call that ops makes, seen in the dispatcher and held against torch_npu's own Meta kernel."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import npufleet.kernels.ops
from npufleet.kernels.distribute_limits import Distribution
from npufleet.kernels.ops import (
    activation,
    attention,
    kv_cache,
    mla,
    mla_prolog,
    moe,
    moe_distribute,
    norm,
    quant,
    quant_weight,
    rope,
    sampling,
)

from .paged import make_case
from .thread_ranks import Meeting, run_ranks

NAMESPACES = ("npu", "atb")
# torch_npu has no Meta kernel for these, so only their schema is checked here
WITHOUT_META = {
    "npu::npu_fused_infer_attention_score.out",
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::npu_fused_infer_attention_score_v2.out",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
    "npu::npu_gather_pa_kv_cache",
    "npu::npu_convert_weight_to_int4pack",
    "npu::npu_format_cast",
}
NOT_OPERATORS = {"_C._weak_ref_tensor"}


class Recorder(TorchDispatchMode):
    """Keeps each call of a torch_npu operator with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self.calls.append((func, args, kwargs or {}, result))
        return result


def expert_layer(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """Experts first … last − 1 of a layer, from the logits to the sum of the experts' rows."""
    weights, experts = moe.top_k_softmax(logits, 2, renormalize=True)
    routed = moe.expand(x, experts, logits.shape[1], first, last)
    rows = moe.feed_forward(routed.rows, gate_up[first:last], down[first:last], routed.counts)
    return moe.combine(rows, routed.places, weights, partial=last - first < logits.shape[1])


def distributed_calls(device: torch.device) -> Iterator[Callable[[], Any]]:
    """Dispatch and combine of two ranks, of which the first is looked at."""
    weights = torch.tensor([[0.5, 0.25], [0.1, 0.9]], device=device)
    experts = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32, device=device)
    for chip, kind, algorithm, hidden in (
        ("Ascend910B3", "A2", "fullmesh", 64),
        ("Ascend910_9391", "A3", "fullmesh_v1", 1024),
    ):
        layout = Distribution(
            generation=kind, algorithm=algorithm, ranks=2, experts=4, top_k=2, hidden=hidden
        )
        x = torch.randn(2, hidden, dtype=torch.bfloat16, device=device)

        def layer(rank: int, x: torch.Tensor, layout: Distribution, quantize: bool) -> torch.Tensor:
            group = moe_distribute.ExpertGroup(name="experts", rank=rank, layout=layout)
            sent = moe_distribute.dispatch(x, experts, weights, group, largest=3, quantize=quantize)
            rows = sent.rows.to(x.dtype)
            return moe_distribute.combine(rows, experts, weights, sent, group, largest=3)

        for quantize in (False, True):
            call = partial(layer, x=x, layout=layout, quantize=quantize)
            yield lambda chip=chip, call=call: run_ranks(Meeting(ranks=2, chip=chip), call)


def latent_calls(device: torch.device) -> Iterator[Callable[[], Any]]:
    """The calls of latent attention."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    latents, ropes, cos, slots = rand(3, 128, 512), rand(3, 128, 64), rand(2, 64), ints(5, -1).long()
    for output in (True, False):
        yield lambda output=output: mla.write_latents(
            rand(2, 576), rand(512), 1e-6, cos, cos, slots, latents, ropes, output=output
        )
    yield lambda: mla.rotate_query(rand(2, 4, 64), cos, cos)
    yield lambda: mla.per_head_matmul(rand(2, 4, 128), rand(4, 128, 512))
    call = mla.LatentAttentionCall(
        query=rand(2, 4, 512),
        query_rope=rand(2, 4, 64),
        latent_cache=latents,
        rope_cache=ropes,
        block_table=ints(1, 2, 0, 0).view(2, 2),
        out=rand(2, 4, 512),
        scale=0.1,
    )
    yield lambda: call.launch([1, 2], [130, 7])
    yield lambda: call.get_workspace([1, 2], [130, 7])
    part = replace(call, lse=torch.empty(2, 4, 1, device=device))
    yield lambda: part.launch([1, 2], [130, 7])
    yield lambda: part.get_workspace([1, 2], [130, 7])
    heads = rand(5, 2, 192), rand(5, 2, 192), rand(5, 2, 128)
    for causal, want_lse in ((True, False), (False, True)):
        yield lambda causal=causal, want_lse=want_lse: mla.expanded_attention(
            *heads, [2, 5], [2, 5], causal=causal, scale=0.1, want_lse=want_lse
        )
    yield lambda: mla.gather_latents(latents, ropes, ints(1, 2).view(1, 2), ints(9), ints(128), 9)
    yield lambda: attention.merge_attention([heads[2]] * 2, [torch.rand(5, 2, device=device)] * 2)


def prolog_calls(device: torch.device) -> Iterator[Callable[[], Any]]:
    """Everything before absorbed attention in one operator, with weights of bfloat16 and of int8."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    cos, caches = zeros(2, 64), (zeros(3, 128, 512), zeros(3, 128, 64))
    slots = torch.tensor([5, -1], device=device)
    columns = {"query_down": (6144, 1536), "query_up": (1536, 768), "key_down": (6144, 576)}
    scales = {f"{name}_scale": zeros(1, n, dtype=torch.float32) for name, (_, n) in columns.items()}

    def layer(dtype: torch.dtype) -> Any:
        quantized = dtype is torch.int8
        weights = mla_prolog.PrologWeights(
            **{name: mla_prolog.to_nz(zeros(*shape, dtype=dtype)) for name, shape in columns.items()},
            **(scales if quantized else {}),
            key_up=zeros(4, 128, 512),
            query_norm=zeros(1536),
            key_norm=zeros(512),
            query_epsilon=1e-6,
            key_epsilon=1e-6,
        )
        token_scale = zeros(2, dtype=torch.float32) if quantized else None
        x = zeros(2, 6144, dtype=dtype)
        return mla_prolog.prolog(x, weights, cos, cos, slots, *caches, token_scale=token_scale)

    for dtype in (torch.bfloat16, torch.int8):
        yield partial(layer, dtype)


def quantized_calls(device: torch.device) -> Iterator[Callable[[], Any]]:
    """The calls over 8-bit integers."""

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)

    x, fp32 = torch.randn(5, 64, dtype=torch.bfloat16, device=device), torch.ones(96, device=device)
    weight = int8(64, 96)
    yield lambda: quant.dynamic_quantize(x)
    for zero in (None, torch.zeros(1, dtype=torch.int32, device=device)):
        yield lambda zero=zero: quant.static_quantize(x, fp32[:1], zero)
    for tokens, bias, dtype in (
        (fp32[:5], None, torch.float16),
        (fp32[:5], fp32, torch.bfloat16),
        (None, fp32.int(), torch.bfloat16),
    ):
        yield lambda tokens=tokens, bias=bias, dtype=dtype: quant.quant_matmul(
            int8(5, 64), weight, fp32, token_scale=tokens, bias=bias, dtype=dtype
        )
    packed = quant_weight.pack_int4(torch.ones(64, 16, dtype=torch.int32, device=device))
    yield lambda: quant_weight.pack_int4(torch.ones(64, 16, dtype=torch.int32, device=device))
    ones = torch.ones(2, 16, dtype=torch.bfloat16, device=device)
    for scale, offset, group in ((ones[:1], None, 0), (ones, ones, 32)):
        yield lambda scale=scale, offset=offset, group=group: quant_weight.int4_matmul(
            x, packed, scale, offset=offset, bias=fp32[:16], group=group
        )
    scales, counts = (
        torch.ones(2, 96, dtype=torch.bfloat16, device=device),
        torch.tensor([2, 3], device=device),
    )
    yield lambda: quant.quant_feed_forward(
        x, int8(2, 64, 96), scales, int8(2, 48, 64), scales[:, :64].contiguous(), counts
    )
    values = torch.randint(-8, 8, (2, 64, 96), dtype=torch.int32, device=device)
    for shape in ((2, 96), (2, 2, 96)):
        scale = torch.ones(shape, dtype=torch.bfloat16, device=device)
        yield lambda scale=scale: quant_weight.grouped_int4_matmul(
            x, quant_weight.pack_int4_experts(values), scale, scale, counts
        )


def sample_calls(device: torch.device) -> Iterator[Callable[[], Any]]:
    """One call of every public function of ops in every form that reaches another operator or argument."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    x, residual, weight = rand(5, 64), rand(5, 64), rand(64)
    yield lambda: norm.rms_norm(x, weight, 1e-5)
    yield lambda: norm.add_rms_norm(x, residual, weight, 1e-5)
    yield lambda: norm.gemma_rms_norm(x, weight, 1e-5)
    yield lambda: norm.gemma_add_rms_norm(x, residual, weight, 1e-5)
    yield lambda: activation.silu_and_mul(x)
    yield lambda: activation.gelu_and_mul(x, "tanh")
    positions, key = torch.arange(5, device=device), rand(5, 32)
    for rotary, neox in ((32, True), (32, False), (16, True)):
        cache = rand(9, rotary)
        yield lambda cache=cache, rotary=rotary, neox=neox: rope.rotary_embedding(
            positions, x, key, cache, 32, rotary, neox
        )
    three, cache = positions.expand(3, -1).contiguous(), rand(9, 32)
    for section, interleaved in (([8, 4, 4], False), ([8, 4, 4], True), ([6, 6, 4], True)):
        yield lambda section=section, interleaved=interleaved: rope.mrope(
            three, x, key, cache, 32, 32, section, True, interleaved
        )
    pages, slots = rand(2, 16, 2, 32), torch.arange(5, dtype=torch.int32, device=device)
    yield lambda: kv_cache.write_kv(rand(5, 2, 32), rand(5, 2, 32), pages, pages.clone(), slots)
    case = make_case([(1, 20), (3, 9)], dtype=torch.bfloat16)
    for window in (None, 5):
        call = attention.PagedAttentionCall(
            **dict(
                zip(("query", "key_cache", "value_cache", "block_table"), case.tensors(device), strict=True)
            ),
            out=torch.empty_like(case.query, device=device),
            scale=0.2,
            sliding_window=window,
        )
        yield lambda call=call: call.launch(case.query_ends, case.kv_lens)
        yield lambda call=call: call.get_workspace(case.query_ends, case.kv_lens)
    part = replace(call, sliding_window=None, causal=False, lse=torch.empty(4, 6, 1, device=device))
    yield lambda: part.launch(case.query_ends, case.kv_lens)
    yield lambda: part.get_workspace(case.query_ends, case.kv_lens)
    packed = rand(5, 2, 16)
    yield lambda: attention.varlen_attention_part(packed, packed, packed, [2, 5], scale=0.2)
    for causal in (True, False):
        yield lambda causal=causal: attention.varlen_attention(
            packed, packed, packed, [2, 5], [2, 5], causal=causal, scale=0.2
        )
    gate_up, down, logits = rand(8, 64, 96), rand(8, 48, 64), rand(5, 8)
    for first, last in ((0, 8), (2, 6)):
        yield lambda first=first, last=last: expert_layer(x, logits, gate_up, down, first, last)
    for score, bias, renormalize in (
        ("softmax", None, True),
        ("sigmoid", rand(8), True),
        ("sigmoid", None, False),
    ):
        yield lambda score=score, bias=bias, renormalize=renormalize: moe.top_k_grouped(
            logits, 2, score=score, bias=bias, groups=2, top_groups=1, renormalize=renormalize
        )
    yield from latent_calls(device)
    yield from prolog_calls(device)
    yield from quantized_calls(device)
    yield from distributed_calls(device)
    yield lambda: sampling.top_k_top_p(rand(5, 40), torch.rand(5, device=device), slots + 1)


@pytest.fixture(scope="module")
def calls(device) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    with Recorder() as recorder:
        for sample in sample_calls(device):
            sample()
    return recorder.calls


def called_in_source() -> set[str]:
    """The operators that ops calls: ``torch_npu.x``, ``torch_npu.x.out``, ``torch.ops.npu.x``."""
    names = set()
    for path in Path(npufleet.kernels.ops.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                parts = ast.unparse(node.func).split(".")
                if parts[0] == "torch_npu":
                    names.add(".".join(parts[1:]))
                elif parts[:2] == ["torch", "ops"] and parts[2] in NAMESPACES:
                    names.add(".".join(parts[3:]))
    return names - NOT_OPERATORS


def qualified(func: Any) -> str:
    return func.name() if hasattr(func, "name") else str(func)


def test_every_operator_in_the_source_is_called_by_the_samples(calls):
    seen = {qualified(func).partition("::")[2] for func, *_ in calls}
    assert called_in_source() and called_in_source() == seen


def differences(func: Any, args: Any, kwargs: Any, result: Any) -> list[str] | None:
    """Where a call's result differs from the Meta kernel's; None if the operator has no Meta kernel."""

    def to_meta(x: Any) -> Any:
        return (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if torch.is_tensor(x)
            else x
        )

    if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified(func), "Meta"):
        return None
    real = tree_leaves(result)
    wanted = tree_leaves(func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs)))
    if len(real) != len(wanted):
        return [f"{len(real)} results, {len(wanted)} of the Meta kernel"]
    shown = [[x if x is None else (x.shape, x.dtype) for x in found] for found in (real, wanted)]
    return [f"{got}, {want} of the Meta kernel" for got, want in zip(*shown, strict=True) if got != want]


def test_results_have_the_shape_and_dtype_of_the_meta_kernel(calls):
    without = set()
    for func, args, kwargs, result in calls:
        found = differences(func, args, kwargs, result)
        if found is None:
            without.add(qualified(func))
        assert not found, (qualified(func), found)
    assert without == WITHOUT_META


def test_the_given_outputs_are_what_the_output_form_returns(calls):
    """The form with given outputs has no Meta kernel: it must return the tensors that it was given."""
    forms = [(kwargs, result) for func, _, kwargs, result in calls if qualified(func).endswith(".out")]
    assert forms
    for kwargs, result in forms:
        assert [x.data_ptr() for x in result] == [x.data_ptr() for x in kwargs["out"]]


def test_a_keyword_that_the_schema_lacks_is_refused(device):
    """The calls above went through torch_npu's real schema; this is what a wrong one looks like."""
    import torch_npu

    with pytest.raises((RuntimeError, TypeError), match=r"epsilon2|unexpected"):
        torch_npu.npu_rms_norm(torch.ones(1, 8, device=device), torch.ones(8, device=device), epsilon2=1e-5)
