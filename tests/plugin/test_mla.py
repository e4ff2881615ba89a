"""Latent attention in the plugin: chunks of earlier tokens, a step's metadata, and what is refused at start."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from npufleet.plugin import register_layers
from npufleet.plugin.attention import mla
from npufleet.plugin.attention.mla_cache import pages
from npufleet.plugin.attention.mla_metadata import LatentMetadataBuilder, Piece, plan_context
from npufleet.plugin.attention.mla_prefill import NPUMLAPrefillBackend

from .test_metadata import batch

Checkpoint = Callable[..., Path]


@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 2000)), max_size=8),
    st.integers(128, 1500),
)
def test_chunks_hold_each_earlier_token_once(context: list[int], limit: int) -> None:
    chunks = plan_context(context, limit)
    seen = {request: 0 for request in range(len(context))}
    for chunk in chunks:
        assert chunk and sum(piece.length for piece in chunk) <= limit
        requests = [piece.request for piece in chunk]
        assert requests == list(range(requests[0], requests[0] + len(requests)))
        for piece in chunk:
            assert piece.length > 0 and piece.start % 128 == 0
            assert piece.start == seen[piece.request]
            seen[piece.request] += piece.length
    assert list(seen.values()) == context


def test_chunks_by_example() -> None:
    def piece(request: int, start: int, length: int) -> Piece:
        return Piece(request=request, start=start, length=length)

    assert plan_context([], 128) == plan_context([0, 0], 128) == []
    assert plan_context([5, 6], 128) == [[piece(0, 0, 5), piece(1, 0, 6)]]
    assert plan_context([5, 0, 6], 128) == [[piece(0, 0, 5)], [piece(2, 0, 6)]]
    assert plan_context([400], 200) == [[piece(0, 0, 128)], [piece(0, 128, 128)], [piece(0, 256, 144)]]
    # what is left of a chunk takes whole pages of the next request, or all of it
    assert plan_context([100, 300], 300) == [[piece(0, 0, 100), piece(1, 0, 128)], [piece(1, 128, 172)]]


def builder(limit: int = 8192) -> LatentMetadataBuilder:
    """A builder without a model around it."""
    made = object.__new__(LatentMetadataBuilder)
    made._limit = limit
    made._shard = made._empty = None
    made._prefill_backend = NPUMLAPrefillBackend(4, 0.1, 512, 128, 64, 128, None)  # type: ignore[arg-type]
    return made


def test_a_step_of_decodes() -> None:
    step = builder().build(0, batch([1, 1, 1], [7, 0, 200]))
    assert (step.query_ends, step.kv_lens, step.num_tokens) == ([1, 2, 3], [8, 1, 201], 3)
    assert step.new is None and step.num_decode_tokens == 3 and step.block_table.shape[0] == 3


def test_a_step_padded_for_a_graph() -> None:
    step = builder().build(0, batch([1], [7], 3, 3))
    assert (step.query_ends, step.kv_lens, step.num_tokens) == ([1, 2, 3, 4], [8, 1, 1, 1], 4)


def test_requests_without_queries_are_left_out() -> None:
    step = builder().build(0, batch([1, 3], [7, 0], 2, 0))
    assert (step.query_ends, step.kv_lens, step.num_tokens) == ([1], [8], 4)
    assert step.new is not None and step.new.query_ends == [3]


def test_a_mixed_step() -> None:
    """A decode, a prefill with 10 earlier tokens, one without, one with 300."""
    made = batch([1, 4, 3, 2], [9, 10, 0, 300])
    made.block_table_tensor = torch.arange(12, dtype=torch.int32).view(4, 3)
    step = builder().build(0, made)
    assert (step.query_ends, step.kv_lens, step.num_tokens) == ([1], [10], 10)
    prefill = step.new
    assert prefill is not None and prefill.query_ends == [4, 7, 9]
    first, second = prefill.chunks
    assert (first.tokens, first.query_ends, first.kv_ends) == (slice(0, 4), [4], [10])
    assert (second.tokens, second.query_ends, second.kv_ends) == (slice(7, 9), [2], [300])
    assert second.block_table.tolist() == [[9, 10, 11]]
    assert (second.lengths.tolist(), second.starts.tolist()) == ([300], [0])
    assert second.lengths.dtype == torch.int32


def test_a_long_context_in_several_chunks() -> None:
    prefill = builder(limit=256).build(0, batch([4, 3], [600, 100])).new
    assert prefill is not None
    assert [(c.starts.tolist(), c.kv_ends) for c in prefill.chunks] == [
        ([0], [256]),
        ([256], [256]),
        ([512, 0], [88, 188]),
    ]
    assert prefill.chunks[2].tokens == slice(0, 7) and prefill.chunks[2].query_ends == [4, 7]


def implementation(**changes: Any) -> mla.AscendMLAImpl:
    right: dict[str, Any] = {
        "num_heads": 3,
        "head_size": 576,
        "scale": 0.1,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
    }
    return mla.AscendMLAImpl(**(right | changes))


def test_a_number_of_heads_that_the_operator_refuses_is_padded() -> None:
    impl = implementation(num_heads=40)
    query = torch.randn(2, 40, 64)
    padded = impl._pad(query)
    assert padded.shape == (2, 64, 64) and torch.equal(padded[:, :40], query) and not padded[:, 40:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 192}, r"192 query heads.*128.*tensor_parallel_size"),
        ({"kv_lora_rank": 256}, r"kv_lora_rank 256.*kv_lora_rank 512"),
        ({"v_head_dim": 64, "qk_nope_head_dim": 64}, r"qk_nope_head_dim 64, v_head_dim 64.*VLLM_MLA_DISABLE"),
        ({"sliding_window": 5}, "a sliding window"),
        ({"logits_soft_cap": 3.0}, "soft cap"),
        ({"indexer": object()}, "sparse indexer"),
        ({"attn_type": "encoder"}, "attention type encoder"),
    ],
)
def test_layers_that_the_operators_do_not_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        implementation(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"block_size": 64}, "block_size not supported"),
        ({"head_size": 320}, "head_size not supported"),
        ({"use_sparse": True}, "sparse attention is not supported"),
    ],
)
def test_the_platform_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    fields = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 128}
    right = AttentionSelectorConfig(**fields, use_mla=True)  # type: ignore[arg-type]
    assert current_platform.get_attn_backend_cls(None, right).endswith("AscendMLABackend")
    with pytest.raises(ValueError, match=message):
        current_platform.get_attn_backend_cls(None, right._replace(**changes))


def test_prefill_of_other_sizes_is_refused() -> None:
    right = MLAPrefillSelectorConfig(
        dtype=torch.bfloat16,
        mla_dimensions=MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    )
    assert current_platform.get_mla_prefill_backend_cls(right) is NPUMLAPrefillBackend
    with pytest.raises(ValueError, match="float16 not supported"):
        current_platform.get_mla_prefill_backend_cls(right._replace(dtype=torch.float16))


def test_the_cache_of_a_token() -> None:
    """vLLM's spec of 576 elements becomes one of 512; strided pages are refused."""
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert mla.AscendMLABackend.customize_spec(spec).page_size_bytes == 128 * 512 * 2
    with pytest.raises(ValueError, match=r"contiguous pages of 128 tokens and 512 elements.*LBHNC"):
        pages(torch.zeros(4, 128, 576)[..., :512], 512)


@pytest.mark.parametrize(
    ("rotary", "found"),
    [(None, "none"), (SimpleNamespace(is_neox_style=True, rotary_dim=64), "one of halves")],
)
def test_other_rotary_embeddings_are_refused(
    rotary: Any, found: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    from npufleet.plugin.layers.mla import NPUMultiHeadLatentAttention

    def only_the_rotary(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_emb = rotary

    monkeypatch.setattr(MultiHeadLatentAttentionWrapper, "__init__", only_the_rotary)
    with pytest.raises(ValueError, match=found):
        NPUMultiHeadLatentAttention()


def test_the_block_is_registered_and_a_model_is_configured(checkpoint: Checkpoint) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    register_layers()
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"].__name__ == "NPUMultiHeadLatentAttention"
    config: VllmConfig = EngineArgs(
        model=str(checkpoint("mla")), skip_tokenizer_init=True, max_model_len=256, dtype="bfloat16"
    ).create_engine_config()
    with set_current_vllm_config(config):
        assert config.model_config.use_mla
