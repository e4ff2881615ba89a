"""Layouts in which a model cannot be split over NPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plan.memory import kinds_of_ranks
from ..plan.model import ModelShape
from ..plan.shared import of_engine
from ..plan.weights import Layout, weights

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


def check(config: Mapping[str, Any], engine: Mapping[str, Any], shape: ModelShape | None) -> None:
    """See that the model of ``config`` can be split as the engine arguments say.

    Args:
        config: the checkpoint's ``config.json``.
        engine: vLLM's engine arguments.
        shape: the model's sizes if its family is known.

    Raises:
        ValueError: naming what does not divide, and what would.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    _check_heads(text, int(engine.get("tensor_parallel_size") or 1))
    _check_pipeline(text, int(engine.get("pipeline_parallel_size") or 1))
    expert_parallel = bool(engine.get("enable_expert_parallel", False))
    if expert_parallel and not any(_number(text, name) for name in _EXPERTS):
        raise ValueError(
            "enable_expert_parallel is set, but the model has no experts; leave it out, tensor_parallel_size "
            "splits the layers of a dense model"
        )
    if shape is not None:
        layout = Layout(
            tensor=int(engine.get("tensor_parallel_size") or 1),
            data=int(engine.get("data_parallel_size") or 1),
            expert_parallel=expert_parallel,
            pipeline=int(engine.get("pipeline_parallel_size") or 1),
            shared=of_engine(engine, "additional_config"),
            context=int(engine.get("decode_context_parallel_size") or 1),
        )
        for rank in kinds_of_ranks(layout):
            weights(shape, rank)


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _check_heads(config: Mapping[str, Any], size: int) -> None:
    """vLLM gives every rank of a tensor-parallel group the same number of attention heads."""
    heads = _number(config, "num_attention_heads")
    if heads > 0 and heads % size:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"tensor_parallel_size is {size}, which does not divide its {heads} attention heads; "
            f"possible are {fitting}"
        )


def _check_pipeline(config: Mapping[str, Any], size: int) -> None:
    layers = _number(config, "num_hidden_layers")
    if layers and size > layers:
        raise ValueError(
            f"pipeline_parallel_size is {size}, but it has {layers} layers; choose at most {layers}"
        )
