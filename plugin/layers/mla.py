"""The block around multi-head latent attention: projections, norms, rotation, cache writes.

vLLM lets a platform replace the whole block. Ours norms, rotates and writes a token's latent and rotary part in
one operator, and looks up the step's cosines and sines once for all layers. Decode steps take the operator of
:mod:`npufleet.kernels.ops.mla_prolog` for all that comes before attention, where it fits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.platforms import current_platform

from npufleet.kernels.ops import quant as quant_ops
from npufleet.kernels.ops.mla import (
    KEY_SIZE,
    LATENT_SIZE,
    ROPE_SIZE,
    per_head_matmul,
    rotate_query,
    write_latents,
)
from npufleet.kernels.ops.mla_prolog import PrologWeights, prolog

from ..attention.mla import AscendMLAImpl
from ..attention.mla_cache import RopeCache
from ..attention.mla_metadata import LatentMetadata
from .mla_prolog import PartsMethod, kind_of, take_apart, why_not

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

NOPE_SIZE = KEY_SIZE - ROPE_SIZE


@maybe_transfer_kv_layer
def _transferred(layer_name: str, attend: Callable[[], None]) -> None:
    """Run ``attend``; a KV connector loads the layer's cache before and stores it afterwards."""
    attend()


class NPUMultiHeadLatentAttention(MultiHeadLatentAttentionWrapper):
    """vLLM's block with the NPU's operators; weights, their names and their loading are vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """:raises ValueError: a rotary embedding that the operators do not compute."""
        super().__init__(*args, **kwargs)
        rotary = self.rotary_emb
        if rotary is None or rotary.is_neox_style or rotary.rotary_dim != ROPE_SIZE:
            found = "none" if rotary is None else f"one of halves or of {rotary.rotary_dim} elements"
            raise ValueError(
                f"multi-head latent attention on NPU needs a rotary embedding of {ROPE_SIZE} elements whose "
                f"pairs are neighbours, the model has {found}; set VLLM_MLA_DISABLE=1 to run it with plain "
                "attention"
            )
        impl = self.mla_attn.impl
        assert isinstance(impl, AscendMLAImpl)
        self.impl = impl
        self.rotary: Any = rotary
        self.rope_cache = RopeCache(f"{self.mla_attn.layer_name}.rope", self.mla_attn.kv_cache_dtype)
        impl.rope_cache = self.rope_cache
        self._parts = self._take_apart()
        self._prolog_weights: PrologWeights | None = None

    def _take_apart(self) -> tuple[PartsMethod, PartsMethod] | None:
        """The down- and up-projections' weights as one operator takes them, None if it does not fit."""
        down, up = self.fused_qkv_a_proj, self.q_b_proj
        if down is None or up is None or self.q_lora_rank is None:
            return None
        kinds = kind_of(down), kind_of(up)
        reason = why_not(
            chip=current_platform.get_device_name(),
            hidden=self.hidden_size,
            query_rank=self.q_lora_rank,
            heads=self.num_heads,
            dtype=down.params_dtype,
            kinds=kinds,
            context_ranks=self.impl.dcp_world_size,
        )
        if reason:
            logger.info_once("Decode steps do not take npu_mla_prolog_v3: %s.", reason)
            return None
        kind = kinds[0]
        assert kind is not None
        widths = self.q_lora_rank, LATENT_SIZE + ROPE_SIZE
        return take_apart(down, kind, widths), take_apart(up, kind, (self.num_heads * self.qk_head_dim,))

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of hidden_states [T, hidden] at positions [T]; returns [T, hidden]."""
        step = self._step()
        output = hidden_states.new_empty(hidden_states.shape[0], self.num_heads * self.v_head_dim)
        if self._parts is not None and step is not None and step.new is None and llama_4_scaling is None:
            self._transferred(partial(self._decode, positions, hidden_states, step, output))
            return self._finish(hidden_states, output)
        query, kv = self._project(hidden_states)
        if llama_4_scaling is not None:
            query = query * llama_4_scaling
        if step is None:  # vLLM measures memory: it takes what the largest chunk of earlier tokens needs
            gathered = 0 if self.impl.context is None else 2 * self.mla_attn.chunked_prefill_workspace_size
            rows = kv.new_empty(gathered, kv.shape[1])  # of all ranks
            self.mla_attn.forward_impl(query, kv, kv, self.mla_attn.kv_cache, cast(Any, None), output=output)
            del rows
        else:
            self._transferred(partial(self._attend, positions, query, kv, step, output))
        return self._finish(hidden_states, output)

    def _transferred(self, attend: Callable[[], None]) -> None:
        """``attend`` between the loads and stores of both caches."""
        _transferred(self.mla_attn.layer_name, partial(_transferred, self.rope_cache.layer_name, attend))

    def _finish(self, hidden_states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What comes after attention; returns [T, hidden]."""
        if self.g_proj is not None:
            output = output * self.g_proj(hidden_states)[0].sigmoid()
        return self.o_proj(output)[0]

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, 192] and the token's latent and rotary part [T, 576], neither normed nor rotated."""
        if self.q_lora_rank is None:
            assert self.kv_a_proj_with_mqa is not None and self.q_proj is not None
            kv = self.kv_a_proj_with_mqa(hidden)[0]
            query = self.q_proj(hidden)[0]
        else:
            assert self.fused_qkv_a_proj is not None and self.q_b_proj is not None
            assert self.q_a_layernorm is not None
            if self._parts is not None:
                down, kv = self._parts[0].products(self.fused_qkv_a_proj, hidden)
            else:
                both = self.fused_qkv_a_proj(hidden)[0]
                down, kv = both.split([self.q_lora_rank, both.shape[-1] - self.q_lora_rank], dim=-1)
            query = self.q_b_proj(self.q_a_layernorm(down))[0]
        return query.view(-1, self.num_heads, self.qk_head_dim), kv

    def _step(self) -> LatentMetadata | None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        step = metadata[self.mla_attn.layer_name]
        assert isinstance(step, LatentMetadata)
        return step

    def _attend(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        step: LatentMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write the step's latents and fill ``output`` [T, heads · 128]: decode tokens first, then prefills."""
        layer, impl, tokens = self.mla_attn, self.impl, step.num_tokens
        assert impl.key_up is not None and impl.value_up is not None, "the weights are not loaded"
        if tokens < output.shape[0]:
            output[tokens:].zero_()
            query, kv, output = query[:tokens], kv[:tokens], output[:tokens]
        cos, sin = (x[:tokens] for x in self._angles(positions, kv))
        written = write_latents(
            kv,
            self.kv_a_layernorm.weight,
            self.kv_a_layernorm.variance_epsilon,
            cos,
            sin,
            step.slot_mapping[:tokens],
            *impl.caches(layer.kv_cache),
            output=step.new is not None,
        )
        nope, rope = query.split([NOPE_SIZE, ROPE_SIZE], dim=-1)
        rope = rotate_query(rope, cos, sin)
        decoded = step.num_decode_tokens
        if step.new is not None:
            assert written is not None
            latents, ropes = written
            heads = torch.cat((nope[decoded:], rope[decoded:]), dim=-1)
            impl.forward_mha(
                heads,
                latents[decoded:],
                ropes[decoded:],
                layer.kv_cache,
                step,
                layer._k_scale,
                output=output[decoded:],
            )
        if decoded:
            absorbed = per_head_matmul(nope[:decoded], impl.key_up)
            attended = impl.decode(absorbed, rope[:decoded], layer.kv_cache, step, layer)
            output[:decoded] = per_head_matmul(attended, impl.value_up).flatten(1)

    def _decode(
        self, positions: torch.Tensor, hidden: torch.Tensor, step: LatentMetadata, output: torch.Tensor
    ) -> None:
        """:meth:`_attend` for a step of decodes alone, in one operator up to attention."""
        layer, impl, tokens = self.mla_attn, self.impl, step.num_tokens
        assert impl.value_up is not None, "the weights are not loaded"
        if tokens < output.shape[0]:
            output[tokens:].zero_()
            hidden, output = hidden[:tokens], output[:tokens]
        if not tokens:
            return
        cos, sin = (x[:tokens] for x in self._angles(positions, hidden))
        if self._prolog_weights is None:  # loaded weights keep their memory, also when they are loaded again
            self._prolog_weights = self._gather_weights()
        weights, token_scale = self._prolog_weights, None
        if weights.quantized:
            hidden, token_scale = quant_ops.dynamic_quantize(hidden)
        slots = step.slot_mapping[:tokens]
        caches = impl.caches(layer.kv_cache)
        absorbed, rope = prolog(hidden, weights, cos, sin, slots, *caches, token_scale=token_scale)
        attended = impl.decode(absorbed, rope, layer.kv_cache, step, layer)
        output.copy_(per_head_matmul(attended, impl.value_up).flatten(1))

    def _gather_weights(self) -> PrologWeights:
        assert self._parts is not None and self.impl.key_up is not None and self.q_a_layernorm is not None
        (query_down, key_down) = self._parts[0].tensors(self.fused_qkv_a_proj)
        (query_up,) = self._parts[1].tensors(self.q_b_proj)
        return PrologWeights(
            query_down=query_down[0],
            query_up=query_up[0],
            key_down=key_down[0],
            key_up=self.impl.key_up,
            query_norm=self.q_a_layernorm.weight,
            key_norm=self.kv_a_layernorm.weight,
            query_epsilon=self.q_a_layernorm.variance_epsilon,
            key_epsilon=self.kv_a_layernorm.variance_epsilon,
            query_down_scale=query_down[1],
            query_up_scale=query_up[1],
            key_down_scale=key_down[1],
        )

    def _angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 64] (32 values twice), looked up by the step's first layer and kept for the
        others, which have the same embedding.
        """
        kept = get_forward_context().additional_kwargs
        name = f"npu_mla_angles_{id(self.rotary)}"
        if name not in kept:
            table = self.rotary._match_cos_sin_cache_dtype(like)
            cos, sin = table.index_select(0, positions.flatten()).chunk(2, dim=-1)
            kept[name] = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return kept[name]


LAYERS: dict[str, type[MultiHeadLatentAttentionWrapper]] = {
    "MultiHeadLatentAttentionWrapper": NPUMultiHeadLatentAttention
}
"""Name of vLLM's class → its replacement."""
