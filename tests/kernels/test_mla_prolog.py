"""The operator before absorbed attention: float64, the separate operators, graphs, and what it refuses."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from npufleet.kernels.ops import mla, norm, quant
from npufleet.kernels.ops.mla_prolog import PrologWeights, misfit, prolog, to_nz
from npufleet.kernels.reference import KERNELS, formats

from .formulas import rms_norm, rotate
from .test_mla import angles, halves

HIDDEN, RANK, HEADS, TOKENS = 6144, 1536, 2, 3
LATENT, ROPE, NOPE, BLOCK = 512, 64, 128, 128
SLOTS = [130, -1, 5]


def matrix(inner: int, outer: int, random: torch.Generator) -> torch.Tensor:
    """Outputs of unit variance for such inputs."""
    return torch.randn(inner, outer, generator=random) * inner**-0.5


class Layer:
    """A layer's weights on the host, a batch, and both on the NPU."""

    def __init__(self, device: torch.device, quantized: bool) -> None:
        random = torch.Generator().manual_seed(3)
        self.device, self.quantized = device, quantized
        sizes = {"query_down": RANK, "key_down": LATENT + ROPE}
        self.host = {name: matrix(HIDDEN, outer, random) for name, outer in sizes.items()}
        self.host["query_up"] = matrix(RANK, HEADS * (NOPE + ROPE), random)
        self.x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
        self.key_up = matrix(HEADS * NOPE, LATENT, random).view(HEADS, NOPE, LATENT).bfloat16()
        self.norms = [(torch.randn(n, generator=random) * 0.2 + 1).bfloat16() for n in (RANK, LATENT)]
        self.turn, cos, sin = angles(TOKENS, random)
        self.cos, self.sin = (x.to(device, torch.bfloat16) for x in (cos, sin))
        scales = {}
        if quantized:
            for name, values in self.host.items():
                scale = values.abs().amax(0, keepdim=True) / 127
                self.host[name] = (values / scale).round().to(torch.int8)
                scales[f"{name}_scale"] = scale.to(device)
        else:
            self.host = {name: values.bfloat16() for name, values in self.host.items()}
        self.wide = {
            name: values.double() * (scales[f"{name}_scale"].cpu().double() if quantized else 1)
            for name, values in self.host.items()
        }
        self.weights = PrologWeights(
            **{name: to_nz(values.to(device)) for name, values in self.host.items()},
            **scales,
            key_up=self.key_up.to(device),
            query_norm=self.norms[0].to(device),
            key_norm=self.norms[1].to(device),
            query_epsilon=1e-6,
            key_epsilon=1e-6,
        )

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        pages = (torch.full((2, BLOCK, n), 7.0, device=self.device) for n in (LATENT, ROPE))
        latents, ropes = (x.bfloat16() for x in pages)
        return latents, ropes

    def run(
        self, x: torch.Tensor, slots: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], **changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_scale = None
        if self.quantized:
            x, token_scale = quant.dynamic_quantize(x)
        weights = replace(self.weights, **changes)
        return prolog(x, weights, self.cos, self.sin, slots, *caches, token_scale=token_scale)


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "int8"])
def layer(request, device) -> Layer:
    return Layer(device, request.param)


@pytest.fixture(scope="module")
def plain(device) -> Layer:
    return Layer(device, False)


def test_against_float64(layer):
    """Queries through both up-projections and latents in their slots; one that is padding is written nowhere."""
    caches, slots = layer.caches(), torch.tensor(SLOTS, device=layer.device)
    x = layer.x.double()
    if layer.quantized:  # tokens by their own scales, as the caller quantizes them
        values, scale = quant.dynamic_quantize(layer.x.to(layer.device))
        x = values.cpu().double() * scale.cpu().double().unsqueeze(1)
    query, rope = layer.run(layer.x.to(layer.device), slots, caches)
    low = rms_norm(x @ layer.wide["query_down"], layer.norms[0], 1e-6)
    heads = (low @ layer.wide["query_up"]).unflatten(1, (HEADS, -1))
    absorbed = torch.einsum("tnk,nkm->tnm", heads[..., :NOPE], layer.key_up.double())
    turned = halves(rotate(heads[..., NOPE:], layer.turn, ROPE, neox=False))
    error = 0.08 if layer.quantized else 0.04  # the normed query is rounded, to int8 or to bfloat16
    for found, wanted in ((query, absorbed), (rope, turned)):
        torch.testing.assert_close(found.cpu().double(), wanted, atol=error, rtol=0.01)
        assert found.is_contiguous()
    both = x @ layer.wide["key_down"]
    latent = rms_norm(both[:, :LATENT], layer.norms[1], 1e-6)
    key_rope = halves(rotate(both[:, None, LATENT:], layer.turn, ROPE, neox=False))[:, 0]
    for cache, wanted in zip(caches, (latent, key_rope), strict=True):
        rows = cache.view(2 * BLOCK, -1).cpu()
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                torch.testing.assert_close(rows[slot].double(), wanted[token], atol=0.03, rtol=0.02)
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[[slot for slot in SLOTS if slot >= 0]] = False
        assert (rows[untouched] == 7).all()


def test_what_it_writes_is_what_the_separate_operators_write(plain):
    """Bit for bit: prefills and decodes share a cache."""
    caches, others, x = plain.caches(), plain.caches(), plain.x.to(plain.device)
    slots, weights = torch.tensor(SLOTS, device=plain.device), plain.weights
    query, rope = plain.run(x, slots, caches)
    both = torch.mm(x, weights.key_down)
    mla.write_latents(both, weights.key_norm, 1e-6, plain.cos, plain.sin, slots, *others, output=False)
    low = norm.rms_norm(torch.mm(x, weights.query_down), weights.query_norm, 1e-6)
    heads = torch.mm(low, weights.query_up).view(TOKENS, HEADS, -1)
    assert torch.equal(rope, mla.rotate_query(heads[..., NOPE:], plain.cos, plain.sin))
    assert torch.equal(query, mla.per_head_matmul(heads[..., :NOPE], weights.key_up))
    assert torch.equal(caches[0], others[0]) and torch.equal(caches[1], others[1])


def test_a_captured_call_reads_new_tokens_and_slots(plain):
    x, slots = plain.x.to(plain.device), torch.full((TOKENS,), -1, device=plain.device)
    caches, graph = plain.caches(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        query, rope = plain.run(x, slots, caches)
    assert (caches[0] == 7).all(), "capturing with padding alone writes nothing"
    x.mul_(-0.5)
    slots.copy_(torch.tensor(SLOTS))
    graph.replay()
    fresh = plain.caches()
    expected = plain.run(x, slots, fresh)
    assert torch.equal(query, expected[0]) and torch.equal(rope, expected[1])
    assert torch.equal(caches[0], fresh[0]) and torch.equal(caches[1], fresh[1])


@pytest.mark.parametrize("name", ["query_down", "query_up", "key_down"])
def test_a_weight_that_nobody_cast_is_refused(plain, name):
    with pytest.raises(ValueError, match="storage format 2, it must be 29"):
        slots = torch.tensor(SLOTS, device=plain.device)
        plain.run(
            plain.x.to(plain.device), slots, plain.caches(), **{name: plain.host[name].to(plain.device)}
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"hidden": 7168, "heads": 128}, ""),
        ({"hidden": 5120}, "hidden size 5120 is none of 6144, 7168, 7680"),
        ({"query_rank": None}, "q_lora_rank None is not 1536"),
        ({"query_rank": 768}, "q_lora_rank 768 is not 1536"),
        ({"heads": 6}, "6 heads are none of"),
        ({"dtype": torch.float16}, "torch.float16 is not bfloat16"),
    ],
)
def test_sizes_that_it_takes(changes, message):
    right: dict[str, Any] = {"hidden": 6144, "query_rank": 1536, "heads": 8, "dtype": torch.bfloat16}
    found = misfit(**(right | changes))
    assert found.startswith(message) and bool(found) == bool(message)


def call(**changes: Any) -> Any:
    """A right call of the reference with host tensors of zeros, some arguments changed."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    right: dict[str, Any] = {
        "token_x": zeros(1, HIDDEN),
        "weight_dq": zeros(HIDDEN, RANK),
        "weight_uq_qr": zeros(RANK, 192),
        "weight_uk": zeros(1, NOPE, LATENT),
        "weight_dkv_kr": zeros(HIDDEN, LATENT + ROPE),
        "rmsnorm_gamma_cq": zeros(RANK),
        "rmsnorm_gamma_ckv": zeros(LATENT),
        "rope_sin": zeros(1, ROPE),
        "rope_cos": zeros(1, ROPE),
        "kv_cache": zeros(2, BLOCK, 1, LATENT),
        "kr_cache": zeros(2, BLOCK, 1, ROPE),
        "cache_index": torch.tensor([0]),
    }
    right |= changes
    names = list(right)[:11]
    tensors = [right.pop(name) for name in names]
    return KERNELS["npu::npu_mla_prolog_v3"](*tensors, **right)


HALF = torch.bfloat16
WRONG = [
    ({"token_x": torch.zeros(1, 5120, dtype=HALF)}, "He is 5120"),
    ({"token_x": torch.zeros(1, HIDDEN, dtype=torch.float16)}, "token_x is torch.float16"),
    ({"weight_dq": torch.zeros(HIDDEN, 768, dtype=HALF)}, "weight_dq (6144, 768) must be [6144, 1536]"),
    ({"weight_dq": torch.zeros(RANK, HIDDEN, dtype=HALF).t()}, "weight_dq is not contiguous"),
    ({"weight_uk": torch.zeros(3, NOPE, LATENT, dtype=HALF)}, "N is 3"),
    ({"weight_uq_qr": torch.zeros(RANK, 384, dtype=HALF)}, "weight_uq_qr (1536, 384) must be [1536, 192]"),
    ({"rope_cos": torch.zeros(1, 32, dtype=HALF)}, "rope_cos (1, 32) must be [1, 64]"),
    ({"rope_sin": torch.zeros(1, ROPE)}, "rope_sin is torch.float32"),
    ({"kv_cache": torch.zeros(2, 64, 1, LATENT, dtype=HALF)}, "BlockSize must be one of"),
    ({"kr_cache": torch.zeros(3, BLOCK, 1, ROPE, dtype=HALF)}, "kr_cache (3, 128, 1, 64)"),
    ({"cache_index": torch.tensor([0], dtype=torch.int32)}, "cache_index is torch.int32"),
    ({"cache_index": torch.tensor([256])}, "above 255"),
    ({"cache_index": torch.tensor([-2])}, "below −1"),
    ({"cache_index": None}, "needs cache_index"),
    ({"dequant_scale_x": torch.zeros(1, 1)}, "takes scales"),
    ({"weight_quant_mode": 2}, "takes scales"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_calls_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"cache_mode": "PA_NZ"}, {"query_norm_flag": True}, {"weight_quant_mode": 1}, {"kc_scale": 2.0}],
)
def test_other_forms_have_no_reference(changes):
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        call(**changes)


def test_a_slot_that_comes_twice_is_refused():
    two = {name: torch.zeros(2, n, dtype=HALF) for name, n in (("token_x", HIDDEN), ("rope_sin", ROPE))}
    with pytest.raises(ValueError, match="a slot comes twice"):
        call(**two, rope_cos=two["rope_sin"], cache_index=torch.tensor([4, 4]))


def test_no_tokens_are_a_right_call():
    none = {name: torch.zeros(0, n, dtype=HALF) for name, n in (("token_x", HIDDEN), ("rope_sin", ROPE))}
    query, rope, *_ = call(**none, rope_cos=none["rope_sin"], cache_index=torch.zeros(0, dtype=torch.int64))
    assert query.shape == (0, 1, LATENT) and rope.shape == (0, 1, ROPE)


def test_formats_that_nobody_knows_are_accepted():
    """Host tensors have none; without the virtual NPU nobody is asked."""
    before = formats.provide(None)
    try:
        formats.require_format("op", formats.FRACTAL_NZ, weight=torch.zeros(2))
    finally:
        formats.provide(before)
    formats.require_format("op", formats.FRACTAL_NZ, weight=torch.zeros(2))
