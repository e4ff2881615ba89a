"""Where the shared experts of a layer are computed: the choice of the user, and what it asks of a layout."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from npufleet.kernels.distribute_limits import Distribution

PLACEMENT, RANKS, OVERLAP = "shared_experts", "shared_expert_ranks", "shared_experts_overlap"
SIZES = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "shared_expert_intermediate_size",
)
"""What configurations call the number or the size of their shared experts."""


class Placement(Enum):
    """The placements that a user can ask for by name."""

    AUTO = "auto"
    """As vLLM's model: replicated where it spreads tokens over the tensor-parallel ranks, else tensor-parallel."""
    SPLIT = "tensor-parallel"
    """Every rank holds a slice."""
    WHOLE = "replicated"
    """Every rank holds them whole, and computes them for tokens that no other rank computes them for."""


@dataclass(frozen=True, kw_only=True)
class SharedPlacement:
    """What was asked for."""

    placement: Placement = Placement.AUTO
    ranks: int = 0
    """Ranks that hold the shared experts and no others, the first of the expert-parallel group; the others then hold
    no shared ones."""
    overlap: bool = False
    """Whether they are computed on a stream of their own, beside what moves tokens to the routed experts."""


def shared_placement(config: "VllmConfig") -> SharedPlacement:
    """What ``additional_config`` asks for.

    :raises ValueError: a value that there is not, or two that contradict each other.
    """
    given = config.additional_config if isinstance(config.additional_config, dict) else {}
    name, ranks, overlap = given.get(PLACEMENT, "auto"), given.get(RANKS, 0), given.get(OVERLAP, False)
    names = {placement.value: placement for placement in Placement}
    if name not in names:
        raise ValueError(f"{PLACEMENT} is {name!r}; allowed are {', '.join(map(repr, names))}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
        raise ValueError(f"{RANKS} is {ranks!r}; allowed are whole numbers from 0")
    if not isinstance(overlap, bool):
        raise ValueError(f"{OVERLAP} is {overlap!r}; allowed are true and false")
    if ranks and (names[name] is not Placement.AUTO or overlap):
        other = PLACEMENT if names[name] is not Placement.AUTO else OVERLAP
        raise ValueError(f"{RANKS} {ranks} says where shared experts are computed: leave {other} out")
    return SharedPlacement(placement=names[name], ranks=ranks, overlap=overlap)


def has_shared_experts(text: Any) -> bool:
    """Whether a model's configuration names shared experts."""
    return any(getattr(text, name, None) for name in SIZES)


def check_placement(config: "VllmConfig") -> None:
    """Refuse a placement that the model or the layout cannot have.

    :raises ValueError: with what stands against it and what to use.
    """
    asked, model, parallel = shared_placement(config), config.model_config, config.parallel_config
    if asked == SharedPlacement() or model is None:
        return
    if not has_shared_experts(model.hf_text_config):
        options = ", ".join((PLACEMENT, RANKS, OVERLAP))
        raise ValueError(f"this model has no shared experts: leave {options} out of additional_config")
    if not asked.ranks:
        return
    if not parallel.enable_expert_parallel:
        raise ValueError(f"{RANKS} needs experts spread over ranks: set enable_expert_parallel")
    if parallel.enable_ep_weight_filter:
        raise ValueError(
            f"{RANKS}: enable_ep_weight_filter reads the experts that vLLM would give each rank, not those that it has "
            "here: leave one of them out"
        )
    ranks, experts = parallel.tensor_parallel_size * parallel.data_parallel_size, model.get_num_experts()
    left = ranks - asked.ranks
    if left < 1 or experts % left:
        raise ValueError(
            f"{RANKS} {asked.ranks} leaves {max(left, 0)} of {ranks} ranks for {experts} experts: choose a number "
            f"that leaves at least one rank and a divisor of {experts}"
        )


def check_operators(ranks: int, chip: str, layer: "Distribution | None") -> None:
    """Refuse ``ranks`` for shared experts alone where fused dispatch and combine cannot reach them. Workers ask: only
    they know the chip.

    :raises ValueError: with the reasons.
    """
    reasons = ["they are not documented for it"] if layer is None else layer.refusals()
    if ranks and reasons:
        raise ValueError(
            f"{RANKS} {ranks}: ranks for shared experts alone need the operators for fused dispatch and combine, but "
            f"on {chip}: {'; '.join(reasons)}. Use {PLACEMENT}: {Placement.WHOLE.value}"
        )
