"""Where an engine computes the shared experts of its layers, as ``additional_config`` says it (``docs/experts.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import checks

AUTO, WHOLE, SPLIT = "auto", "replicated", "tensor-parallel"
PLACEMENT, RANKS, OVERLAP = "shared_experts", "shared_expert_ranks", "shared_experts_overlap"


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """The choice of an engine."""

    placement: str = AUTO
    ranks: int = 0
    """Ranks that hold the shared experts and no others."""
    overlap: bool = False
    """Whether they are computed beside the routed ones."""


AS_VLLM = SharedExperts()
"""Nothing was chosen."""


def of_engine(engine: Mapping[str, Any], where: str) -> SharedExperts:
    """What vLLM's engine arguments say.

    Args:
        where: what errors call the engine.

    Raises:
        ValueError: for a value that the plugin refuses too.
    """
    given = engine.get("additional_config")
    if not isinstance(given, Mapping):
        return AS_VLLM
    return SharedExperts(
        placement=checks.choice(given.get(PLACEMENT, AUTO), f"{where}: {PLACEMENT}", (AUTO, WHOLE, SPLIT)),
        ranks=checks.integer(given.get(RANKS, 0), f"{where}: {RANKS}", 0, 1 << 20),
        overlap=checks.flag(given.get(OVERLAP, False), f"{where}: {OVERLAP}"),
    )
