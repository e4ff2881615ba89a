"""Replay a trace against an endpoint at its own times, stretched or compressed.

Requests are sent when the trace says so, whether or not earlier ones are answered (open loop): an endpoint that
is too slow shows it in its latencies instead of slowing the client down.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from .target import Outcome, Target
from .trace import TRACE_BLOCK, TraceRequest, tokens

Progress = Callable[[int, int, int, int], None]  # sent, ended, failed, all


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a trace is replayed."""

    time_scale: float = 1.0  # 2 = twice as fast as recorded
    length_scale: float = 1.0  # prompts and answers, for engines smaller than the trace's
    limit: int | None = None  # only the first so many requests
    max_in_flight: int = 10_000  # more are counted as failed instead of sent
    drain: float = 600.0  # seconds that answers may take after the last request was sent

    def __post_init__(self) -> None:
        if not 0 < self.time_scale < math.inf or not 0 < self.length_scale <= 1:
            raise ValueError(
                f"--time-scale must be above 0 and --length-scale in (0, 1], got {self.time_scale:g} and "
                f"{self.length_scale:g}"
            )

    def requests(self, trace: Sequence[TraceRequest]) -> list[TraceRequest]:
        """The requests to send, with times and lengths scaled."""
        made = []
        for one in trace[: self.limit]:
            prompt = max(1, round(one.prompt_tokens * self.length_scale))
            made.append(
                replace(
                    one,
                    at=one.at / self.time_scale,
                    prompt_tokens=prompt,
                    output_tokens=max(1, round(one.output_tokens * self.length_scale)),
                )
            )
        return made


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What counts as good, in seconds."""

    ttft: float = 2.0
    tpot: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a replay. Times are seconds."""

    requests: int
    failed: int
    seconds: float  # from the first request to the last answer
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    output_tokens_per_second: float
    hit_rate: float  # share of prompt tokens that engines had cached
    good: float  # share of all requests within the objectives
    goodput: float  # such requests per second
    late_p99: float  # how late requests were sent: more than a few ms means that the client is too slow
    errors: dict[str, int]

    def as_dict(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


async def replay(
    trace: Sequence[TraceRequest], to: Target, plan: Plan, progress: Progress | None = None
) -> list[Outcome]:
    """Send the requests of ``trace``; one outcome each, in order."""
    requests = plan.requests(trace)
    begun = time.monotonic() + 0.1
    outcomes = [Outcome(due=begun + one.at) for one in requests]
    running: set[asyncio.Task[None]] = set()
    for number, (one, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        made = _tokens(one, number, to.vocabulary, plan.length_scale)
        await asyncio.sleep(max(0.0, outcome.due - time.monotonic()))
        if len(running) >= plan.max_in_flight:
            outcome.error = f"not sent: {plan.max_in_flight} requests are in flight"
        else:
            task = asyncio.create_task(to.generate(made, one.output_tokens, one.session, outcome))
            running.add(task)
            task.add_done_callback(running.discard)
        if progress is not None:
            _tell(progress, outcomes, number + 1)
    await _drain(running, plan.drain, outcomes, progress)
    for outcome in outcomes:
        if outcome.end < 0 and not outcome.error:
            outcome.error = f"no end within {plan.drain:.0f} s after the last request"
    return outcomes


def sum_up(outcomes: Sequence[Outcome], objectives: Objectives) -> Report:
    """The numbers of a replay."""
    well = [one for one in outcomes if not one.error]
    ttft = sorted(one.ttft for one in well)
    tpot = sorted(one.tpot for one in well)
    late = sorted(one.sent - one.due for one in outcomes if one.sent >= 0)
    ends = [one.end for one in well]
    seconds = max(ends) - min(one.due for one in outcomes) if ends else 0.0
    good = sum(one.ttft <= objectives.ttft and one.tpot <= objectives.tpot for one in well)
    prompts = sum(one.prompt_tokens for one in well)
    errors: dict[str, int] = {}
    for one in outcomes:
        if one.error:
            kind = one.error.split(":")[0][:80]
            errors[kind] = errors.get(kind, 0) + 1
    return Report(
        requests=len(outcomes),
        failed=len(outcomes) - len(well),
        seconds=seconds,
        ttft_mean=sum(ttft) / len(ttft) if ttft else 0.0,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p90=quantile(ttft, 0.9),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p90=quantile(tpot, 0.9),
        output_tokens_per_second=sum(one.output_tokens for one in well) / seconds if seconds else 0.0,
        hit_rate=sum(one.cached_tokens for one in well) / prompts if prompts else 0.0,
        good=good / len(outcomes) if outcomes else 0.0,
        goodput=good / seconds if seconds else 0.0,
        late_p99=quantile(late, 0.99),
        errors=errors,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``ordered`` lies; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _tokens(one: TraceRequest, number: int, vocabulary: int, scale: float) -> list[int]:
    if scale == 1.0 or not one.hash_ids:
        return tokens(one, number, vocabulary)
    # Shorter prompts keep their shared beginnings: each block is cut to the same share of itself.
    block = max(1, round(TRACE_BLOCK * scale))
    whole = replace(one, prompt_tokens=len(one.hash_ids) * TRACE_BLOCK)
    full = tokens(whole, number, vocabulary)
    cut = [token for at in range(0, len(full), TRACE_BLOCK) for token in full[at : at + block]]
    return (cut + tokens(replace(one, hash_ids=()), number, vocabulary))[: one.prompt_tokens]


def _tell(progress: Progress, outcomes: Sequence[Outcome], sent: int) -> None:
    ended = sum(one.end >= 0 for one in outcomes[:sent])
    failed = sum(bool(one.error) for one in outcomes[:sent])
    progress(sent, ended, failed, len(outcomes))


async def _drain(
    running: set[asyncio.Task[None]], seconds: float, outcomes: Sequence[Outcome], progress: Progress | None
) -> None:
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        await asyncio.wait(running, timeout=1.0)
        if progress is not None:
            _tell(progress, outcomes, len(outcomes))
    for task in list(running):
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
