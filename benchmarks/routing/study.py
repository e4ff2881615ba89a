"""One run of the study: a workload from a trace, a fleet, a policy, and the numbers that come out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from npufleet.cluster.bench.trace import TRACE_BLOCK, TraceRequest
from npufleet.cluster.router.base import Policy
from npufleet.cluster.router.prefix.prompt import Key
from npufleet.cluster.router.registry import known_policies, load_policy
from npufleet.cluster.sim.fleet import Arrival, FleetSpec, Record, VirtualFleet

from .formulas import FORMULAS

TTFT_OBJECTIVE = 4.0  # seconds
TPOT_OBJECTIVE = 0.2
PARTS = ("first", "second", "whole")  # the weights of our policies are chosen on the first half alone


def take(trace: Sequence[TraceRequest], part: str) -> list[TraceRequest]:
    """A half of ``trace``, its times counted from its own beginning, or all of it."""
    middle = len(trace) // 2
    some = {"first": trace[:middle], "second": trace[middle:], "whole": trace}[part]
    return [replace(one, at=one.at - some[0].at) for one in some]


class BlockPrompt:
    """A prompt that is known by the ids of its blocks of ``TRACE_BLOCK`` tokens."""

    __slots__ = ("_head", "_keys", "length")

    def __init__(self, request: TraceRequest) -> None:
        self.length = request.prompt_tokens
        self._head = str(request.hash_ids[:1]).encode()
        keys: list[Key] = []
        parent = 0
        for one in request.hash_ids[: self.length // TRACE_BLOCK]:
            parent = hash((parent, one))
            keys.append(parent)
        self._keys = tuple(keys)

    def keys(self, block_size: int) -> Sequence[Key]:
        """Its whole blocks."""
        assert block_size == TRACE_BLOCK, block_size
        return self._keys

    def anchor(self, tokens: int) -> bytes:
        """Its first block's id, which is the same for all who begin alike."""
        return self._head


def policies() -> dict[str, Callable[[], Policy]]:
    """Ours by name, then the published formulas."""
    ours: dict[str, Callable[[], Policy]] = {name: _ours(name) for name in known_policies()}
    return {**ours, **{kind.name: kind for kind in FORMULAS}}


def _ours(name: str) -> Callable[[], Policy]:
    def make() -> Policy:
        policy = load_policy(name)
        if hasattr(policy, "_seed"):
            policy._seed = 1  # the study is deterministic
        return policy

    return make


def workload(trace: Sequence[TraceRequest], prompts: Sequence[BlockPrompt], rate: float) -> list[Arrival]:
    """The trace at ``rate`` requests per second, its bursts kept."""
    stretch = len(trace) / (trace[-1].at * rate)
    return [
        Arrival(at=one.at * stretch, prompt=prompt, output_tokens=one.output_tokens, session=one.session)
        for one, prompt in zip(trace, prompts, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times in seconds, rates and shares as said."""

    policy: str
    engines: int
    load: float  # offered requests per second over the fleet's capacity
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p90: float
    hit_rate: float  # share of the prompt tokens of those served found cached
    goodput: float  # share of requests within both objectives
    failed: int
    refused: float  # share of requests

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def run(
    spec: FleetSpec, name: str, make: Callable[[], Policy], arrivals: Sequence[Arrival], load: float
) -> Result:
    """Serve ``arrivals`` and sum up."""
    return sum_up(VirtualFleet(spec, make).run(arrivals), name, spec.engines, load)


def sum_up(records: Sequence[Record], name: str, engines: int, load: float) -> Result:
    """The numbers of one run."""
    ttft = sorted(record.first - record.arrival.at for record in records if record.first >= 0)
    tpot = {
        id(record): (record.end - record.first) / max(1, record.arrival.output_tokens - 1)
        for record in records
        if record.end >= 0
    }
    good = sum(
        record.first - record.arrival.at <= TTFT_OBJECTIVE and tpot[id(record)] <= TPOT_OBJECTIVE
        for record in records
        if id(record) in tpot
    )
    spread = sorted(tpot.values())
    return Result(
        policy=name,
        engines=engines,
        load=load,
        ttft_mean=statistics.fmean(ttft),
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        ttft_p99=_quantile(ttft, 0.99),
        tpot_p90=_quantile(spread, 0.9),
        hit_rate=sum(r.cached for r in records)
        / sum(r.arrival.prompt.length for r in records if not r.refused),
        goodput=good / len(records),
        failed=sum(record.failed for record in records),
        refused=sum(record.refused for record in records) / len(records),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
