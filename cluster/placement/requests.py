"""What an engine of a model deployment asks placement for."""

from __future__ import annotations

from ..config import ModelConfig
from ..endpoints import Role
from .plan import Request


def of(model: ModelConfig, engine_id: str) -> Request:
    """Return the request of one engine of ``model``; its parallel sizes are vLLM's engine arguments."""
    return Request(
        engine_id=engine_id,
        model=model.name,
        tensor_parallel_size=model.tensor_parallel_size,
        pipeline_parallel_size=model.pipeline_parallel_size,
        data_parallel_size=model.data_parallel_size,
        expert_parallel=bool(model.engine.get("enable_expert_parallel", False)),
        role=Role(model.role),
        serves=model.asked_for,
        priority=model.priority,
        soc=model.chip,
    )
