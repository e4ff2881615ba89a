"""Choosing experts through the NPU's gating operators.

A model asks vLLM for a router; vLLM's compute with kernels for other devices. The runner replaces the one it is
given by ours with the same parameters.
"""

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter

from npufleet.kernels.ops import moe as ops

SMALLEST_GROUP = 3  # experts of a group, for the gating operator
IN_PYTORCH = (CustomRoutingRouter, RoutingSimulatorRouter)
"""Routers that vLLM computes with PyTorch alone: they stay."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a layer chooses experts; the parameters of :func:`npufleet.kernels.ops.moe.top_k_grouped`."""

    top_k: int
    score: str
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


class NPURouter(BaseRouter):
    """A rule, and the bias that the layer may have learnt, over the logits of a layer."""

    def __init__(
        self, rule: Rule, bias: torch.Tensor | None, experts: int, method: RoutingMethodType
    ) -> None:
        """:raises ValueError: groups of fewer experts than the gating operator takes."""
        super().__init__(rule.top_k, experts)
        self.rule = rule
        self.bias = bias
        self._method = method
        self._plain = rule.score == "softmax" and bias is None and rule.groups == 1 and rule.scale == 1.0
        if not self._plain and experts // rule.groups < SMALLEST_GROUP:
            raise ValueError(
                f"{experts} experts in {rule.groups} groups: NPUs choose among groups of at least "
                f"{SMALLEST_GROUP} experts; this checkpoint cannot be served"
            )

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """vLLM's name for the rule."""
        return self._method

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 [T, k] and experts int32 [T, k] for ``router_logits`` [T, experts]."""
        rule = self.rule
        if self._plain:
            return ops.top_k_softmax(router_logits, rule.top_k, renormalize=rule.renormalize)
        return ops.top_k_grouped(
            router_logits,
            rule.top_k,
            score=rule.score,
            bias=self.bias,
            groups=rule.groups,
            top_groups=rule.top_groups,
            renormalize=rule.renormalize,
            scale=rule.scale,
        )


def _grouped_rule(router: GroupedTopKRouter) -> Rule:
    """As vLLM, a grouping that does not divide the experts is no grouping."""
    experts, groups = router.global_num_experts, router.num_expert_group
    grouped = experts > groups and experts % groups == 0
    return Rule(
        top_k=router.top_k,
        score=router.scoring_func,
        renormalize=router.renormalize,
        scale=router.routed_scaling_factor,
        groups=groups if grouped else 1,
        top_groups=router.topk_group if grouped else 1,
    )


def _rule(router: FusedMoERouter) -> Rule | None:
    if isinstance(router, GroupedTopKRouter) and router.num_fused_shared_experts == 0:
        return _grouped_rule(router)
    if isinstance(router, FusedTopKBiasRouter):
        plain = router._hash_indices_table is None and router.bias_vl is None
        if plain and router.num_fused_shared_experts == 0:
            return Rule(
                top_k=router.top_k,
                score=router.scoring_func,
                renormalize=router.renormalize,
                scale=router.routed_scaling_factor,
            )
    if isinstance(router, FusedTopKRouter):
        return Rule(top_k=router.top_k, score=router.scoring_func, renormalize=router.renormalize)
    return None


def npu_router(router: FusedMoERouter) -> FusedMoERouter:
    """The router that chooses as ``router`` does, on the NPU.

    :raises ValueError: a way of choosing that NPUs do not compute yet.
    """
    if isinstance(router, (NPURouter, *IN_PYTORCH)):
        return router
    rule = _rule(router)
    if rule is None or rule.score not in ops.SCORES:
        raise ValueError(
            f"experts chosen by {type(router).__name__} ({getattr(router, 'scoring_func', 'no score')}) are not "
            f"supported on NPU yet; supported are top-k over {' or '.join(ops.SCORES)}, with or without groups "
            "and a bias"
        )
    assert isinstance(router, BaseRouter)
    bias = getattr(router, "e_score_correction_bias", None)
    return NPURouter(rule, bias, router.global_num_experts, router.routing_method_type)
