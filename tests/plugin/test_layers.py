"""Our layers against vLLM's own formulas, for every class name that is registered."""

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from npufleet.plugin import register_layers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
TOKENS, HEADS, KV_HEADS, HEAD = 7, 4, 2, 64


@pytest.fixture(autouse=True)
def current_config() -> Iterator[None]:
    register_layers()
    config = VllmConfig()
    assert "all" in config.compilation_config.custom_ops
    with set_current_vllm_config(config):
        yield


def same(ours: object, theirs: object, dtype: torch.dtype) -> None:
    ours = ours if isinstance(ours, tuple) else (ours,)
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.device.type == "npu" and a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a.cpu(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_registration_can_be_repeated() -> None:
    before = dict(op_registry_oot)
    register_layers()
    assert before == op_registry_oot


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("residual", [False, True])
def test_norms(cls: type, dtype: torch.dtype, residual: bool) -> None:
    torch.manual_seed(0)
    layer = cls(96).to(dtype)
    layer.weight.data.normal_(std=0.5)
    x = torch.randn(TOKENS, 96).to(dtype)
    extra = [torch.randn(TOKENS, 96).to(dtype)] if residual else []
    theirs = layer.forward_native(x.clone(), *[e.clone() for e in extra])
    ours = layer.to("npu")(x.npu(), *[e.npu() for e in extra])
    same(ours, theirs, dtype)
    assert type(layer) in op_registry_oot.values()


def test_a_norm_over_part_of_the_width_takes_vllms_formula() -> None:
    layer = RMSNorm(96, var_hidden_size=32)
    x = torch.randn(TOKENS, 96)
    same(layer.to("npu")(x.npu()), layer.cpu().forward_native(x), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make", [SiluAndMul, GeluAndMul, lambda: GeluAndMul("tanh")], ids=["silu", "gelu", "gelu_tanh"]
)
def test_activations(make: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(TOKENS, 192).to(dtype)
    same(layer(x.npu()), layer.forward_native(x), dtype)
    assert type(layer) in op_registry_oot.values()


ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "mrope": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    "mrope_interleaved": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [16, 8, 8],
        "mrope_interleaved": True,
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "neox"),
    [(kind, neox) for kind in sorted(ROPES) for neox in (True, False) if neox or "mrope" not in kind],
)
def test_rotary_embeddings(kind: str, neox: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotary_embedding._ROPE_DICT.clear()
    layer = rotary_embedding.get_rope(
        HEAD, max_position=512, is_neox_style=neox, rope_parameters=ROPES[kind], dtype=dtype
    )
    assert type(layer) in op_registry_oot.values()
    axes = (3, TOKENS) if "mrope" in kind else (TOKENS,)
    positions = torch.randint(0, 256, axes)
    query, key = torch.randn(TOKENS, HEADS * HEAD).to(dtype), torch.randn(TOKENS, KV_HEADS * HEAD).to(dtype)
    theirs = layer.forward_native(positions, query.clone(), key.clone())
    ours = layer.to("npu")(positions.npu(), query.npu(), key.npu())
    same(ours, theirs, dtype)


def test_a_rotary_embedding_without_a_key() -> None:
    rotary_embedding._ROPE_DICT.clear()
    layer = rotary_embedding.get_rope(HEAD, 512, rope_parameters=ROPES["plain"], dtype=torch.float32)
    positions, query = torch.arange(TOKENS), torch.randn(TOKENS, HEADS * HEAD)
    theirs = layer.forward_native(positions, query.clone(), None)
    same(layer.to("npu")(positions.npu(), query.npu(), None), theirs, torch.float32)
