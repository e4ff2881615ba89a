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

from .communication import BySize, Communication
from .communication.base import Own
from .experts import LocalExperts, check_layer, local_experts
from .own_ranks import shared_rank
from .placement import PLACEMENT, RANKS, SharedPlacement, shared_placement
from .router import npu_router
from .shared import SharedExperts
from .shared_linear import claim

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def divides(dtype: torch.dtype, model_type: str) -> bool:
    """Whether a layer divides what the shared experts make by the routed experts' factor, instead of multiplying what
    the routed ones make, so that float16 does not overflow.

    vLLM's layer does so for every model in float16, and relies on its decoder layers to divide the rest of the stream
    by the factor. Those of DeepSeek do; those of GLM-4-MoE do not (vLLM 0.32), and their sums would be too small.

    :param model_type: what the model's configuration says.
    """
    return dtype == torch.float16 and not model_type.startswith("glm4")


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
        config = get_current_vllm_config()
        self._communication: Communication = BySize(self.moe_config, config)
        self._reduced = False
        model = config.model_config
        kind = "" if model is None else str(getattr(model.hf_text_config, "model_type", ""))
        self._halved = self._shared_experts is not None and divides(self.moe_config.in_dtype, kind)
        self._shared: SharedExperts | None = None
        self._local = self._place(kwargs.get("shared_experts"), shared_placement(config))
        # Whether one sum holds everything: not where the routed experts' has to be transformed first.
        self._joined = self.routed_output_transform is None and (self._shared is None or self._shared.own)

    def _place(self, layer: torch.nn.Module | None, asked: SharedPlacement) -> LocalExperts:
        """The experts of this rank; sets the shared ones that it computes for its tokens.

        :raises ValueError: ranks for shared experts alone in a layer that has none.
        """
        if self.routed_output_transform is not None and asked != SharedPlacement(overlap=asked.overlap):
            raise ValueError(
                f"{self.layer_name}: where routed experts have a width of their own, shared ones stay where vLLM puts "
                f"them: leave {PLACEMENT} and {RANKS} out of additional_config"
            )
        if not asked.ranks:
            if layer is not None:
                self._shared = SharedExperts(layer, self.moe_config, overlap=asked.overlap)
            return local_experts(self.routed_experts)
        if layer is None:
            raise ValueError(
                f"{self.layer_name} has no shared experts: leave {RANKS} out of additional_config"
            )
        claim(layer)
        if self.moe_config.ep_rank >= asked.ranks:
            return local_experts(self.routed_experts, asked.ranks)
        factor = 1.0 / self.routed_scaling_factor if self._halved else 1.0  # see _scaled
        return shared_rank(layer, self.routed_experts, asked.ranks, factor)

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

    def _scaled(self, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts' weights [T, k] with the layer's factor in them, which vLLM multiplies their sum with.

        In float16 vLLM divides what the shared experts make instead, see :func:`divides`.
        """
        factor = self.routed_scaling_factor
        return weights if factor == 1.0 or self._halved else weights * factor

    def _start(self, x: torch.Tensor | None) -> Own | None:
        """Start the shared experts of this rank on ``x`` [T, hidden], if it has any."""
        if self._shared is None:
            return None
        assert x is not None
        wait = self._shared.start(x)
        if not self._joined or not self._halved or self.routed_scaling_factor == 1.0:
            return wait
        return lambda: wait() * (1.0 / self.routed_scaling_factor)

    def _maybe_apply_routed_scale_to_output(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As vLLM's, where the factor is not in the sum already; see :func:`divides`."""
        if self._joined:
            return shared_output, fused_output
        if self._halved or self.routed_scaling_factor == 1.0:
            return super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)
        return shared_output, fused_output * self.routed_scaling_factor

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> Output:
        """The layer's output for ``hidden_states`` [T, hidden], the shared experts' in it; or behind that of the
        shared experts, where both are summands that the tensor-parallel ranks hold.
        """
        shared = None if self._shared is None else self._start(shared_experts_input)
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        weights, experts = self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, input_ids=input_ids
        )
        own = None
        if self._joined:
            weights, own, shared = self._scaled(weights), shared, None
        out, self._reduced = self._communication.run(
            hidden_states, weights, experts, self._local, get_forward_context().dp_metadata, own
        )
        return out if shared is None else (shared(), out)
