"""References of npu_fused_infer_attention_score 1 and 2: plain, into given outputs, and the workspace.

What they accept is in :mod:`.attention_arguments`, what they compute in :mod:`.attention_math`; attention over
latents is in :mod:`.latent_attention`.
"""

from typing import Any

import torch

from .attention_arguments import V1, V2, prepare
from .attention_math import attend
from .checks import require_contiguous, require_dtype, wrong
from .latent_attention import attend_latents, is_latent, prepare_latent
from .registry import reference


def _compute(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_latent(op, given):
        out, lse = attend_latents(*prepare_latent(op, query, key, value, given))
        return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse
    call, want_lse = prepare(op, query, key, value, given)
    out, lse = attend(call, want_lse)
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse.unsqueeze(-1)


def _compute_into(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    given: dict[str, Any],
    workspace: torch.Tensor | None,
    targets: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    if workspace is not None:
        require_dtype(op, "workspace", workspace, (torch.uint8,))
    if len(targets) != 2:
        raise wrong(op, f"out has {len(targets)} tensors, it must have 2")
    out, lse_out = targets
    if is_latent(op, given):
        latents, want_lse = prepare_latent(op, query, key, value, given)
        _check_target(op, "attention_out", out, tuple(query.shape), query.dtype)
        if want_lse:
            _check_target(op, "softmax_lse", lse_out, (*query.shape[:2], 1), torch.float32)
        _, lse = attend_latents(latents, want_lse, out)
        if lse is not None:
            lse_out.copy_(lse)
        return out, lse_out
    call, want_lse = prepare(op, query, key, value, given)
    shape = (*query.shape[:2], call.value.shape[2])
    _check_target(op, "attention_out", out, shape, query.dtype)
    require_dtype(op, "softmax_lse", lse_out, (torch.float32,))
    if want_lse:  # without it the target may have any shape
        _check_target(op, "softmax_lse", lse_out, (*query.shape[:2], 1), torch.float32)
    _, lse = attend(call, want_lse, out)
    if lse is not None:
        lse_out.copy_(lse.unsqueeze(-1))
    return out, lse_out


def _check_target(
    op: str, name: str, target: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if target.dtype != dtype:
        raise wrong(op, f"{name} is {target.dtype}, the result is {dtype}")
    if target.shape != shape:
        raise wrong(op, f"{name} is {tuple(target.shape)}, the result is {shape}")
    require_contiguous(op, **{name: target})


def _workspace(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> torch.Tensor:
    """Bytes that the largest call of this shape may need: the reference needs none, so one score row per
    query head.
    """
    (prepare_latent if is_latent(op, given) else prepare)(op, query, key, value, given)
    return query.new_empty(max(1, query.shape[0] * query.shape[1]) * 4, dtype=torch.uint8)


@reference(f"npu::{V1}")
def fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [T, heads, D]: the output like query, and the log-sum-exp [T, heads, 1] (or [0]) in
    float32.
    """
    return _compute(V1, query, key, value, given)


@reference(f"npu::{V1}.out")
def fused_infer_attention_score_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: list[torch.Tensor],
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into given tensors, with a workspace of the size that the workspace query answered."""
    return _compute_into(V1, query, key, value, given, workspace, out)


@reference(f"npu::_{V1}_get_max_workspace")
def fused_infer_attention_score_get_max_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> torch.Tensor:
    """A workspace (bytes) for any lengths that calls of this shape may have."""
    return _workspace(V1, query, key, value, given)


@reference(f"npu::{V2}")
def fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Version 2: the same under other argument names."""
    return _compute(V2, query, key, value, given)


@reference(f"npu::{V2}.out")
def fused_infer_attention_score_v2_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: list[torch.Tensor],
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Version 2 into given tensors."""
    return _compute_into(V2, query, key, value, given, workspace, out)


@reference(f"npu::_{V2}_get_max_workspace")
def fused_infer_attention_score_v2_get_max_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> torch.Tensor:
    """The workspace of version 2."""
    return _workspace(V2, query, key, value, given)


def _empty_outputs(
    op: str, query: torch.Tensor, input_layout: str, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for a later call with ``out=``; values have the head size of the queries, as in every call."""
    flags = ("softmax_lse_flag", "return_softmax_lse")
    unknown = [k for k, v in given.items() if v is not None and k not in (*flags, *_SHAPES_DO_NOT_NEED)]
    if input_layout != "TND" or query.dim() != 3 or unknown:
        raise wrong(op, f"the reference infers outputs of TND queries, not {input_layout} with {unknown}")
    rows = (*query.shape[:2], 1) if any(given.get(flag) for flag in flags) else (0,)
    return torch.empty_like(query), query.new_empty(rows, dtype=torch.float32)


_SHAPES_DO_NOT_NEED = ("block_table", "num_heads", "num_query_heads", "num_key_value_heads", "query_rope")


@reference(f"npu::_{V1}_infer_output")
def fused_infer_attention_score_infer_output(
    query: torch.Tensor, value: torch.Tensor, *, input_layout: str = "BSH", **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (attention_out like query, softmax_lse) that torch_npu's graph update asks for."""
    return _empty_outputs(f"_{V1}_infer_output", query, input_layout, given)


@reference(f"npu::_{V2}_infer_output")
def fused_infer_attention_score_v2_infer_output(
    query: torch.Tensor, value: torch.Tensor, *, input_layout: str = "BSH", **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of version 2."""
    return _empty_outputs(f"_{V2}_infer_output", query, input_layout, given)
