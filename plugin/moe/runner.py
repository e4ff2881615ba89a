"""The forward pass of a mixture-of-experts layer."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from .communication import BySize, Communication
from .experts import check_layer, local_experts
from .router import npu_router

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class NPUMoERunner(MoERunner):
    """vLLM's runner with the NPU's routers, experts and ways of communication.

    The parts of vLLM's that stay: loading, shared experts and their gate, transforms and scales around the experts,
    and the final all-reduce where the communication has left a sum to be made.
    """

    def __init__(
        self,
        layer_name: str,
        moe_config: FusedMoEConfig,
        router: FusedMoERouter,
        routed_experts: RoutedExperts,
        **kwargs: Any,
    ) -> None:
        """Arguments as vLLM's runner.

        :raises ValueError: experts, or a way of choosing them, that NPUs do not compute.
        """
        super().__init__(layer_name, moe_config, npu_router(router), routed_experts, **kwargs)
        assert not self._fse_fuse_gate, "vLLM fuses the gates on another platform only"
        check_layer(routed_experts)
        self._communication: Communication = BySize(self.moe_config, get_current_vllm_config())
        self._experts = local_experts(self.routed_experts)
        self._reduced = False

    def _select_forward(self) -> Callable[..., Any]:
        """Call the implementation directly: nothing is compiled, so it need not hide behind an operator."""
        return self._forward_direct

    def _forward_direct(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: Any,
        hidden_dim_unpadded: int,
    ) -> Output:
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)

    @property
    def _fused_output_is_reduced(self) -> bool:
        """Whether the latest forward pass left nothing to sum over the tensor-parallel ranks."""
        return self._reduced

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> Output:
        """The experts' output for ``hidden_states`` [T, hidden], behind that of the shared experts if there are
        any.
        """
        shared = None
        if self._shared_experts is not None:
            self._maybe_apply_shared_experts(shared_experts_input, SharedExpertsOrder.NO_OVERLAP)
            shared = self._shared_experts.output
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        weights, experts = self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, input_ids=input_ids
        )
        out, self._reduced = self._communication.run(
            hidden_states, weights, experts, self._experts, get_forward_context().dp_metadata
        )
        return out if shared is None else (shared, out)
