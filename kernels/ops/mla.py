"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): the cache holds one latent and one rotary part per token.

A key head is the latent through its up-projection, followed by the rotary part, which all heads share; a value
head is the latent through another up-projection. Two forms of the same attention:

- *absorbed*, for decode: the key's up-projection is applied to the query instead, so every head attends over
  the latents themselves and the value's up-projection is applied to the result (npu_fused_infer_attention_score
  2 with ``query_rope``). It reads 576 elements of a token for all heads.
- *expanded*, for prefill: keys of 192 and values of 128 elements are made from the latents. New tokens attend
  causally among themselves, earlier ones are gathered from the cache in pieces, and the partial results are
  merged by their log-sum-exp (:func:`.attention.merge_attention`).

The rotary operators take pairs of neighbours and leave them as halves, in keys and queries alike.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_npu

from .attention import CAUSAL, NO_MASK, CapturedAttention, causal_mask, no_lse, weak_reference

LATENT_SIZE, ROPE_SIZE = 512, 64
KEY_SIZE, VALUE_SIZE = 192, 128  # of an expanded head; the key's last 64 elements are rotary
HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Query heads that the absorbed form takes."""
PAGE_TOKENS = 128
"""Tokens of a page; the absorbed form takes 16 as well, and no other number."""


def padded_heads(heads: int) -> int:
    """The smallest number of heads that the absorbed form takes and that is not below ``heads``.

    :raises ValueError: more than 128 heads.
    """
    for count in HEAD_COUNTS:
        if count >= heads:
            return count
    raise ValueError(
        f"{heads} query heads on one NPU exceed the {HEAD_COUNTS[-1]} that latent attention takes; raise "
        "tensor_parallel_size, or lower decode_context_parallel_size, which gathers heads"
    )


def write_latents(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    *,
    output: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Norm each token's latent, rotate its rotary part and write both to their slots of the caches, in place.

    :param kv: [T, 576] in fp16 or bf16: the projection's latent and rotary part.
    :param gamma: [512], weight of the norm.
    :param cos: [T, 64], the 32 cosines of a token's position twice; sin likewise.
    :param slots: int64 [T], block · 128 + offset; below 0 skips the token (padding).
    :param latent_cache: [blocks, 128, 512] and rope_cache [blocks, 128, 64], contiguous.
    :param output: whether the caller needs what was written.
    :returns: (latents [T, 512], rotary parts [T, 64]) if ``output``, else None.
    """
    tokens = kv.shape[0]
    *_, rope, latent = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.contiguous().view(tokens, 1, 1, -1),
        gamma,
        cos.view(tokens, 1, 1, -1),
        sin.view(tokens, 1, 1, -1),
        slots,
        rope_cache.unsqueeze(2),
        latent_cache.unsqueeze(2),
        epsilon=epsilon,
        cache_mode="PA",
        is_output_kv=output,
    )
    return (latent.view(tokens, -1), rope.view(tokens, -1)) if output else None


def rotate_query(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the rotary parts query [T, heads, 64] by cos and sin [T, 64] as in :func:`write_latents`.

    Returns a new contiguous tensor of that shape.
    """
    tokens, heads, size = query.shape
    turned = torch_npu.npu_interleave_rope(
        query.contiguous().view(tokens, heads, 1, size),
        cos.view(tokens, 1, 1, size),
        sin.view(tokens, 1, 1, size),
    )
    return turned.view(tokens, heads, size)


def per_head_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, heads, K] by each head's weight [heads, K, M]. Returns [T, heads, M], contiguous.

    One operator where it fits: K and M multiples of 128, heads · K below 65,536; else a batched product with
    its transposes.
    """
    heads, inner, outer = weight.shape
    if x.shape[0] and inner % 128 == 0 and outer % 128 == 0 and heads * inner < 65536:
        return torch_npu.npu_transpose_batchmatmul(
            x.contiguous(), weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class LatentAttentionCall:
    """One launch of absorbed attention, one query per request, without its lengths.

    The counterpart of :class:`npufleet.kernels.ops.attention.PagedAttentionCall`, with the same methods.
    """

    query: torch.Tensor  # [T, heads, 512], contiguous; heads in HEAD_COUNTS
    query_rope: torch.Tensor  # [T, heads, 64], contiguous
    latent_cache: torch.Tensor  # [blocks, 128, 512], contiguous
    rope_cache: torch.Tensor  # [blocks, 128, 64], contiguous
    block_table: torch.Tensor  # int32 [T, most blocks of a request]
    out: torch.Tensor  # [T, heads, 512], overwritten
    scale: float
    lse: torch.Tensor | None = None  # float32 [T, heads, 1], overwritten with the scaled scores' log-sum-exp
    workspace: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a workspace depends on beside the number of tokens."""
        return ("latent", self.query.shape[1:], self.latent_cache.shape, self.query.dtype, self.lse is None)

    def _arguments(
        self, query_ends: list[int], kv_lens: list[int]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (self.query, self.latent_cache, self.latent_cache), {
            "query_rope": self.query_rope,
            "key_rope": self.rope_cache,
            "actual_seq_qlen": query_ends,
            "actual_seq_kvlen": kv_lens,
            "block_table": self.block_table,
            "block_size": self.latent_cache.shape[1],
            "input_layout": "TND",
            "num_query_heads": self.query.shape[1],
            "num_key_value_heads": 1,
            "softmax_scale": self.scale,
            "sparse_mode": NO_MASK,
            **({} if self.lse is None else {"return_softmax_lse": True}),
        }

    def get_workspace(self, query_ends: list[int], kv_lens: list[int]) -> torch.Tensor:
        """A workspace large enough for any lengths of this shape. Ask once per shape, before the capture."""
        tensors, arguments = self._arguments(query_ends, kv_lens)
        return torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(*tensors, **arguments)

    def launch(self, query_ends: list[int], kv_lens: list[int]) -> None:
        """Compute into ``out``. ``query_ends`` is 1, 2 … T; ``kv_lens`` is per request, at least 1."""
        tensors, arguments = self._arguments(query_ends, kv_lens)
        lse = no_lse(self.query.device) if self.lse is None else self.lse
        torch_npu.npu_fused_infer_attention_score_v2.out(
            *tensors, **arguments, workspace=self.workspace, out=[self.out, lse]
        )

    def capture(self, stream: Any, query_ends: list[int], kv_lens: list[int]) -> CapturedAttention:
        """Launch inside an open graph capture, as a task whose lengths can be replaced at each replay."""
        return CapturedAttention.capture(self, stream, query_ends, kv_lens)

    def weak(self) -> "LatentAttentionCall":
        """The same call holding what lives in a graph's memory pool weakly."""
        parts = {name: weak_reference(getattr(self, name)) for name in ("query", "query_rope", "out")}
        return replace(self, **parts, lse=None if self.lse is None else weak_reference(self.lse))


def expanded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: list[int],
    kv_ends: list[int],
    *,
    causal: bool,
    scale: float,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of packed heads, see the module's text.

    :param query: [T, heads, 192]; key [S, heads, 192] and value [S, heads, 128], contiguous, bf16.
    :param query_ends: cumulative, the last is T; kv_ends likewise for S. No request lacks queries or keys.
    :param causal: align the last query with the last key and hide later keys; otherwise every key is seen.
    :returns: ([T, heads, 128], the log-sum-exp of the scaled scores, float32 [T, heads], if wanted).
    """
    visible: dict[str, Any] = {"sparse_mode": NO_MASK}
    if causal:
        visible = {"sparse_mode": CAUSAL, "atten_mask": causal_mask(query.device)}
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        query,
        key,
        value,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=kv_ends,
        input_layout="TND",
        num_query_heads=query.shape[1],
        num_key_value_heads=key.shape[1],
        softmax_scale=scale,
        return_softmax_lse=want_lse,
        **visible,
    )
    return out, lse.squeeze(-1) if want_lse else None


def gather_latents(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens from the paged caches into packed tensors (latents [total, 512], rotary parts [total, 64]).

    :param latent_cache: [blocks, 128, 512]; rope_cache [blocks, 128, 64].
    :param block_table: int32 [B, n]; lengths int32 [B], of sum ``total``; starts int32 [B], each the first
        token of a block.
    """
    latents = latent_cache.new_empty(total, 1, latent_cache.shape[2])
    ropes = rope_cache.new_empty(total, 1, rope_cache.shape[2])
    torch_npu.npu_gather_pa_kv_cache(
        latent_cache.unsqueeze(2),
        rope_cache.unsqueeze(2),
        block_table.contiguous(),
        lengths,
        latents,
        ropes,
        seq_offset=starts,
    )
    return latents.squeeze(1), ropes.squeeze(1)
