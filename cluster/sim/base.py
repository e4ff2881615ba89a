"""What a simulated engine does, step by step; two implementations share it.

``BlockCore`` (``blocks.py``) is a model of vLLM's scheduler and KV-cache manager, thousands of times as fast as
time; ``SchedulerCore`` (``scheduler.py``) runs the real ones. Neither knows a clock: whoever drives it lets the
seconds of each step pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.prefix.prompt import Key


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """One request as an engine gets it."""

    request_id: str
    prompt_tokens: int
    output_tokens: int  # it stops after so many
    keys: Sequence[Key] = ()  # of its whole prefix blocks, in the engine's block size
    token_ids: Sequence[int] = ()  # for an engine that hashes them itself


class Step(NamedTuple):
    """A planned step, or a run of ``steps`` like ones, each ``growth`` seconds longer than the one before."""

    steps: int
    first: float  # seconds
    growth: float = 0.0

    def seconds(self, count: int) -> float:
        """How long the first ``count`` of them take."""
        return count * self.first + self.growth * (count * (count - 1) / 2)

    def done_by(self, seconds: float) -> int:
        """The smallest number of steps, at least one, that take as long as ``seconds`` or longer."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a step, or a run of them, brought."""

    started: list[tuple[str, int]] = field(default_factory=list)  # first token: (id, cached tokens)
    finished: list[str] = field(default_factory=list)
    stored: list[tuple[Key, ...]] = field(default_factory=list)  # blocks that are cached now
    removed: list[Key] = field(default_factory=list)  # blocks that no longer are
    preempted: int = 0


class Core(ABC):
    """Schedules requests on one device."""

    @abstractmethod
    def add(self, request: SimRequest) -> None:
        """Queue a request. ValueError for one that can never fit."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Give up a request; unknown ids are ignored."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is anything to do."""

    @abstractmethod
    def begin(self) -> Step:
        """Plan the next step; only while busy and with no step under way."""

    @abstractmethod
    def end(self, count: int) -> Outcome:
        """The first ``count`` steps of the plan are done."""

    @abstractmethod
    def load(self) -> LoadReport:
        """What the engine says about itself now."""
