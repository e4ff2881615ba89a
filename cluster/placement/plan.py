"""The words of placement: what an engine asks for, where its ranks come to sit, and why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..endpoints import Role


class Rule(StrEnum):
    """What every plan keeps."""

    NPUS = "npus"  # an NPU belongs to one rank, and only healthy ones are given out
    HCCS = "hccs"  # a tensor-parallel group stays inside one HCCS domain
    RINGS = "rings"  # A2 of 16 NPUs: up to 8 in one ring, above an even number, half of it in each
    DIE_PAIRS = "die-pairs"  # A3: one NPU, or an even number in whole packages
    SUPER_POD = "super-pod"  # an expert-parallel group stays inside one super-pod (one RoCE network on A2)
    ONE_CHIP = "one-chip"  # all NPUs of an engine are of one kind


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one engine needs: ``data_parallel_size`` replicas of ``pipeline_parallel_size`` stages of
    ``tensor_parallel_size`` NPUs.
    """

    engine_id: str
    model: str
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    role: Role = Role.BOTH
    serves: str = ""
    """The name that clients ask for, which prefill and decode deployments share; that of the model if empty."""
    priority: int = 0
    """Higher ones are placed first, and may take the NPUs of lower ones where the fleet allows that."""
    soc: str = ""
    """The chip it must run on; any if empty."""

    @property
    def kin(self) -> tuple[str, Role]:
        """What engines that do the same have in common: the name that clients ask for, and the role."""
        return self.serves or self.model, self.role

    @property
    def groups(self) -> int:
        """Tensor-parallel groups."""
        return self.pipeline_parallel_size * self.data_parallel_size

    @property
    def npus(self) -> int:
        """NPUs of the whole engine."""
        return self.groups * self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One NPU for one worker: the place of ``rank`` is NPU ``npu`` of ``node_id``.

    Ranks count tensor-parallel first, then pipeline, then data, as vLLM counts them. ``npu`` is None where Ray
    does not know the node's NPUs by their indices and chooses one itself.
    """

    rank: int
    node_id: str
    npu: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bundles of one engine in the order of their ranks."""

    engine_id: str
    bundles: tuple[Bundle, ...]
    preempts: tuple[str, ...] = ()
    """Engines of lower priority that have to end first."""

    def npus_on(self, node_id: str) -> int:
        """Return how many NPUs of ``node_id`` the plan takes."""
        return sum(bundle.node_id == node_id for bundle in self.bundles)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An engine that has its NPUs, or was promised them."""

    engine_id: str
    bundles: tuple[Bundle, ...]
    model: str = ""
    role: Role = Role.BOTH
    serves: str = ""  # as a request's
    priority: int = 0

    @property
    def kin(self) -> tuple[str, Role]:
        """As a request's."""
        return self.serves or self.model, self.role


def placed_as(request: Request, bundles: tuple[Bundle, ...]) -> Placed:
    """Return the engine of ``request`` as one that sits on ``bundles``."""
    return Placed(
        engine_id=request.engine_id,
        bundles=bundles,
        model=request.model,
        role=request.role,
        serves=request.serves,
        priority=request.priority,
    )


def weight(request: Request) -> tuple[int, int, int]:
    """Return what orders requests that are placed together, the first one largest."""
    return request.priority, request.tensor_parallel_size, request.npus


class NoRoom(ValueError):
    """The request cannot be placed; the text names the rule, what is missing and the closest that would fit.

    ``never`` is true when it would not fit even if the whole fleet were idle, so that waiting is useless.
    """

    def __init__(
        self, message: str, *, never: bool, rule: Rule = Rule.NPUS, closest: Request | None = None
    ) -> None:
        super().__init__(message)
        self.never = never
        self.rule = rule
        self.closest = closest
