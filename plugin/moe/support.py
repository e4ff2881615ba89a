"""Layouts of experts that cannot work, refused before any process starts."""

from typing import TYPE_CHECKING, Any

from .communication.preference import preferred_way
from .placement import Placement, SharedPlacement, check_placement, shared_placement

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig


def check_experts(config: "VllmConfig") -> None:
    """:raises ValueError: an expert-parallel setting that is not supported or does not divide the model."""
    parallel, model = config.parallel_config, config.model_config
    preferred_way(config)
    # Experts of a model that has none, and balancing them, are refused by vLLM before it asks the platform.
    if model is None or not model.is_moe:
        return
    _check_settings(parallel)
    check_placement(config)
    _check_division(model, parallel, shared_placement(config))


def _check_settings(parallel: "ParallelConfig") -> None:
    default = "allgather_reducescatter"
    if parallel.all2all_backend != default:
        raise ValueError(
            f"all2all_backend {parallel.all2all_backend!r} is not for NPU: leave it out (it is then {default!r}); "
            "the way of each step is chosen by its size"
        )
    if parallel.enable_expert_parallel and parallel.expert_placement_strategy != "linear":
        raise ValueError(
            f"expert_placement_strategy {parallel.expert_placement_strategy!r} is not supported on NPU yet: use "
            "'linear'"
        )


def _middle(text: Any) -> int | None:
    """The intermediate size of an expert, where the configuration names it."""
    return getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)


def _check_division(model: "ModelConfig", parallel: "ParallelConfig", asked: SharedPlacement) -> None:
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    ranks, experts, middle = tensor * data, model.get_num_experts(), _middle(model.hf_text_config)
    layout = f"{ranks} ranks (tensor_parallel_size {tensor} × data_parallel_size {data})"
    if parallel.enable_expert_parallel:
        if not asked.ranks and experts % ranks:
            raise ValueError(
                f"{experts} experts cannot be spread evenly over {layout}: choose sizes whose product divides "
                f"{experts}, or leave enable_expert_parallel off"
            )
    elif middle is not None and middle % ranks:
        raise ValueError(
            f"experts of {middle} intermediate elements cannot be split over {layout}: choose sizes whose product "
            f"divides {middle}, or set enable_expert_parallel, which keeps experts whole"
        )
    shared = getattr(model.hf_text_config, "n_shared_experts", None) or 0
    whole = asked.ranks or asked.placement is Placement.WHOLE
    if middle is not None and not whole and shared * middle % tensor:
        raise ValueError(
            f"shared experts of {shared * middle} intermediate elements cannot be split over tensor_parallel_size "
            f"{tensor}: choose one that divides {shared * middle}, or set shared_experts to 'replicated'"
        )
