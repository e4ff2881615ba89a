"""The baseline of the operation counts: vLLM's layers as a platform gets them that brings no layers of its own.

- Norms, activations and rotary embeddings: vLLM's ``forward_native`` (``custom_ops=["none"]``).
- Latent attention: vLLM's own block and layer around it, over the same attention operators.
- Choosing experts: vLLM's router in plain PyTorch, the one its CPU platform uses.
- Experts: one at a time over all tokens, weighted and added up. vLLM has no form without kernels; this one has fixed
  shapes and reads nothing on the host, so a graph can hold it.

Linear layers, attention operators, cache writes, sampler and runner are the same on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from npufleet.plugin.layers.mla import NPUMultiHeadLatentAttention
from npufleet.plugin.moe.communication.base import Own
from npufleet.plugin.moe.router import NPURouter
from npufleet.plugin.moe.runner import NPUMoERunner

SETTINGS: dict[str, Any] = {"compilation_config": {"custom_ops": ["none"]}}


class PlainLatentAttention(NPUMultiHeadLatentAttention):
    """The plugin's block only for its caches; vLLM's forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As vLLM's; its layer asks only whether there is something to decode."""
        step = self._step()
        if step is not None and step.num_decodes and step.decode is None:
            step.decode = cast(Any, True)
        return MultiHeadLatentAttentionWrapper.forward(self, *args, **kwargs)


def _plain_router(router: Any, ours: NPURouter) -> CPURouter:
    rule, grouped = ours.rule, isinstance(router, GroupedTopKRouter) or ours.bias is not None
    return CPURouter(
        top_k=rule.top_k,
        global_num_experts=ours.global_num_experts,
        use_grouped_topk=grouped,
        num_expert_group=rule.groups if grouped else None,
        topk_group=rule.top_groups if grouped else None,
        renormalize=rule.renormalize,
        scoring_func=rule.score,
        routed_scaling_factor=rule.scale,
        e_score_correction_bias=ours.bias,
    )


@dataclass(frozen=True)
class PlainExperts:
    """In the place of the ways of communication, on one rank."""

    layer: Any

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        local: Any,
        step: Any,
        own: Own | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """All experts over all tokens ``x`` [T, hidden], then the shared ones' output; nothing is reduced."""
        layer, out = self.layer, None
        for index in range(layer.global_num_experts):
            share = (weights * (experts == index)).sum(-1, keepdim=True).to(x.dtype)
            gate, up = (x @ layer.w13_weight[index]).chunk(2, dim=-1)
            part = (torch.nn.functional.silu(gate) * up) @ layer.w2_weight[index] * share
            out = part if out is None else out + part
        assert out is not None
        return out if own is None else out + own(), False


class PlainMoERunner(NPUMoERunner):
    """Plain routing and experts, on one rank."""

    def __init__(
        self, layer_name: str, moe_config: Any, router: Any, routed_experts: Any, **kwargs: Any
    ) -> None:
        super().__init__(layer_name, moe_config, router, routed_experts, **kwargs)
        ours: Any = self.router
        self.router: Any = _plain_router(router, ours)
        self._communication: Any = PlainExperts(routed_experts)


def register() -> None:
    """Put these in the place of the plugin's, before vLLM loads plugins; those already there stay."""
    PluggableLayer.register_oot(PlainLatentAttention, name="MultiHeadLatentAttentionWrapper")
    PluggableLayer.register_oot(PlainMoERunner, name="MoERunner")
