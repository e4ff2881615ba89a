"""What decode does before it attends over latents, in one operator (npu_mla_prolog_v3).

Down- and up-projection of the queries with the norm between them, absorption of the keys' up-projection, rotation,
norm and rotation of the new token, and the write of both parts to their pages. It takes the sizes of DeepSeek V3 and
Kimi K2 alone (:func:`misfit`), bfloat16 or int8 weights in FRACTAL_NZ, and rotates as :mod:`.mla` does, so both ways of
writing and reading a cache mix.
"""

from dataclasses import dataclass

import torch
import torch_npu

from .mla import HEAD_COUNTS

FRACTAL_NZ = 29
"""CANN's number of the storage format that its matrix unit reads."""
HIDDEN_SIZES = (6144, 7168, 7680)
QUERY_RANK = 1536


def misfit(*, hidden: int, query_rank: int | None, heads: int, dtype: torch.dtype) -> str:
    """Why the operator does not take a layer of these sizes, empty if it does.

    :param heads: query heads on this NPU.
    :param dtype: of what goes through the layer.
    """
    if dtype != torch.bfloat16:
        return f"{dtype} is not bfloat16"
    if hidden not in HIDDEN_SIZES:
        return f"hidden size {hidden} is none of {', '.join(map(str, HIDDEN_SIZES))}"
    if query_rank != QUERY_RANK:
        return f"q_lora_rank {query_rank} is not {QUERY_RANK}"
    if heads not in HEAD_COUNTS:
        return f"{heads} heads are none of {', '.join(map(str, HEAD_COUNTS))}"
    return ""


def to_nz(weight: torch.Tensor) -> torch.Tensor:
    """A copy of ``weight`` [k, n] in FRACTAL_NZ; shape and elements are the same to every operator."""
    config = torch.npu.config
    config.allow_internal_format = True  # else the cast gives ND, with a warning
    try:
        return torch_npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ)
    finally:
        config.allow_internal_format = False  # torch_npu's own choice on these chips


@dataclass(frozen=True, kw_only=True)
class PrologWeights:
    """The weights of one layer. int8 matrices have a scale for each column, fp32 [1, n]; bfloat16 ones have none."""

    query_down: torch.Tensor
    """[hidden, 1536], FRACTAL_NZ."""
    query_up: torch.Tensor
    """[1536, heads · 192], FRACTAL_NZ; of each head 128 columns before 64 rotary ones."""
    key_down: torch.Tensor
    """[hidden, 576], FRACTAL_NZ: latent, rotary part."""
    key_up: torch.Tensor
    """bf16 [heads, 128, 512], ND."""
    query_norm: torch.Tensor
    """bf16 [1536]."""
    key_norm: torch.Tensor
    """bf16 [512]."""
    query_epsilon: float
    key_epsilon: float
    query_down_scale: torch.Tensor | None = None
    query_up_scale: torch.Tensor | None = None
    key_down_scale: torch.Tensor | None = None

    @property
    def quantized(self) -> bool:
        """Whether the matrices are int8 and tokens have to be."""
        return self.query_down_scale is not None


def prolog(
    x: torch.Tensor,
    weights: PrologWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    *,
    token_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries of tokens, whose latents and rotary parts go to the caches, in place.

    :param x: [T, hidden] in bf16, or int8 with ``token_scale`` fp32 [T] where the weights are.
    :param cos: bf16 [T, 64], the 32 cosines of a token's position twice; sin likewise.
    :param slots: int64 [T], block · 128 + offset; below 0 skips the token (padding).
    :param latent_cache: bf16 [blocks, 128, 512] and rope_cache [blocks, 128, 64], contiguous.
    :returns: (queries [T, heads, 512], their rotary parts [T, heads, 64]), both bf16.
    """
    assert weights.quantized == (token_scale is not None)
    query, rope, *_ = torch_npu.npu_mla_prolog_v3(
        x,
        weights.query_down,
        weights.query_up,
        weights.key_up,
        weights.key_down,
        weights.query_norm,
        weights.key_norm,
        sin,
        cos,
        latent_cache.unsqueeze(2),
        rope_cache.unsqueeze(2),
        cache_index=slots,
        dequant_scale_x=None if token_scale is None else token_scale.unsqueeze(1),
        dequant_scale_w_dq=weights.query_down_scale,
        dequant_scale_w_uq_qr=weights.query_up_scale,
        dequant_scale_w_dkv_kr=weights.key_down_scale,
        rmsnorm_epsilon_cq=weights.query_epsilon,
        rmsnorm_epsilon_ckv=weights.key_epsilon,
        cache_mode="PA_BSND",
        weight_quant_mode=2 if weights.quantized else 0,
    )
    return query, rope
