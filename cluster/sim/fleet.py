"""A fleet of simulated engines behind the real routing code, under one virtual clock in one process.

Arrivals, step ends and deliveries of events are kept in one heap and happen in the order of their times, so a
run is deterministic and takes as long as its decisions take. The routers are ``router/decider.py`` itself with
its ledgers, its index and its learnt paces; only the clock, the engines and the network are simulated. Each
router hears of an engine's blocks and load only by what the engine publishes, ``event_lag`` seconds later, and
of its own requests by their answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from npufleet.cluster.admission.gate import overdue, soonest
from npufleet.cluster.router.base import LoadReport, Policy, RequestInfo
from npufleet.cluster.router.decider import Claim, Decider
from npufleet.cluster.router.ledger import Ledger
from npufleet.cluster.router.prefix.prompt import Prompt
from npufleet.cluster.sim.base import Outcome, SimRequest, Step
from npufleet.cluster.sim.blocks import BlockCore
from npufleet.cluster.sim.timing import DeviceTime

MODEL = "sim"
_REPORT_TTL = 5.0
_PUSH_LAG = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request of a workload."""

    at: float  # seconds
    prompt: Prompt
    output_tokens: int
    session: str = ""


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """What is simulated. Times are seconds."""

    engines: int
    device: DeviceTime
    block_size: int = 512  # tokens
    routers: int = 1  # each request goes to one of them in turn
    event_lag: float = 0.1  # from the end of a step to the router that hears of it
    load_interval: float = 0.1  # an engine publishes its load at most this often
    slow: tuple[int, ...] = ()  # engines that take ``slow_factor`` times as long
    slow_factor: float = 3.0
    kill: tuple[int, float, float] | None = None  # engine, when it dies, when a new one takes its place
    ttft_objective: float = 0.0  # routers refuse what they predict to be later; 0: they refuse nothing


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request. Times are seconds; -1 = never."""

    arrival: Arrival
    cached: int = 0  # prompt tokens that the engine had
    believed: int = 0  # what the router thought it had
    engine: str = ""
    first: float = -1.0
    end: float = -1.0
    failed: bool = False  # its engine died after the first token
    refused: bool = False  # by a router, for its objective
    tries: int = 0


@dataclass(slots=True, eq=False)
class _Engine:
    name: str
    core: BlockCore
    step: Step | None = None
    since: float = 0.0
    version: int = 0  # of the planned end; a plan that was cut short leaves a stale one in the heap
    published: float = -1.0
    live: dict[str, tuple[Record, Claim]] = field(default_factory=dict)


class _Router:
    def __init__(
        self, policy: Policy, clock: Callable[[], float], block_size: int, number: int, learns: bool
    ) -> None:
        self.decider = Decider(policy, clock, learns=learns, guess_block=block_size, salt=number)
        self.ledgers: dict[str, Ledger] = {}

    def hear(
        self, engine: str, outcome: Outcome | None, load: LoadReport | None, lag: float, size: int
    ) -> None:
        """What an engine published ``lag`` seconds ago."""
        ledger = self.ledgers.get(engine)
        if ledger is None:
            return
        if load is not None:
            ledger.take(load, ledger.mark_before(max(lag, _PUSH_LAG)))
        index = self.decider.index(MODEL)
        if index is not None and outcome is not None:
            index.removed(engine, outcome.removed)
            for keys in outcome.stored:
                index.stored(engine, [(key, key) for key in keys], block_size=size)


class VirtualFleet:
    """Runs a workload through routers and engines."""

    def __init__(self, spec: FleetSpec, policy: Callable[[], Policy]) -> None:
        """``policy`` makes one policy for each router."""
        self.spec = spec
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._ids = count()
        self._routers = [
            _Router(policy(), lambda: self.now, spec.block_size, number, spec.ttft_objective > 0)
            for number in range(spec.routers)
        ]
        self._engines: dict[str, _Engine] = {}
        for place in range(spec.engines):
            self._join(place, 0)

    @property
    def deciders(self) -> list[Decider]:
        """The routers' deciders."""
        return [router.decider for router in self._routers]

    def run(self, workload: Iterable[Arrival]) -> list[Record]:
        """Serve ``workload`` to its end; one record per request, in order."""
        records = [Record(arrival) for arrival in workload]
        for record in records:
            self._at(record.arrival.at, self._arrive, record)
        if self.spec.kill is not None:
            place, dies, returns = self.spec.kill
            self._at(dies, self._die, f"e{place}.0")
            self._at(returns, self._join, place, 1)
        while self._heap:
            self.now, _, act, given = heapq.heappop(self._heap)
            act(*given)
        return records

    def _at(self, when: float, act: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act, given))

    def _join(self, place: int, life: int) -> None:
        spec = self.spec
        device = spec.device.slowed(spec.slow_factor) if place in spec.slow else spec.device
        name = f"e{place}.{life}"
        self._engines[name] = _Engine(name, BlockCore(device, spec.block_size))
        for router in self._routers:
            router.ledgers[name] = Ledger(name, lambda: self.now)

    def _die(self, name: str) -> None:
        engine = self._engines.pop(name)
        for router in self._routers:
            del router.ledgers[name]
            router.decider.forget(MODEL, name)
        for record, claim in engine.live.values():
            claim.ended()
            if record.first >= 0:
                record.failed = True
            else:
                self._arrive(record)

    def _arrive(self, record: Record) -> None:
        number = next(self._ids)
        router = self._routers[number % len(self._routers)]
        arrival = record.arrival
        length = arrival.prompt.length
        info = RequestInfo(model=MODEL, prompt_tokens=length, session=arrival.session, prompt=arrival.prompt)
        ledgers = list(router.ledgers.values())
        if self.spec.ttft_objective and not record.tries:
            wait, own = soonest(info, router.decider.look(MODEL, info, ledgers, _REPORT_TTL))
            record.refused = overdue(wait, own, self.spec.ttft_objective) > 0
            if record.refused:
                return
        claim = router.decider.choose(MODEL, info, ledgers, _REPORT_TTL)
        engine = self._engines[claim.engine_id]
        record.engine, record.believed = engine.name, claim.cached_tokens
        record.tries += 1
        name = str(number)
        engine.live[name] = (record, claim)
        engine.core.add(
            SimRequest(
                request_id=name,
                prompt_tokens=length,
                output_tokens=arrival.output_tokens,
                keys=arrival.prompt.keys(self.spec.block_size),
            )
        )
        if engine.step is None:
            self._start(engine)
        elif engine.step.steps > 1:  # a run of like steps ends with the step that is under way
            self._plan(engine, engine.step._replace(steps=engine.step.done_by(self.now - engine.since)))

    def _start(self, engine: _Engine) -> None:
        engine.since = self.now
        self._plan(engine, engine.core.begin())

    def _plan(self, engine: _Engine, step: Step) -> None:
        engine.step = step
        engine.version += 1
        self._at(engine.since + step.seconds(step.steps), self._end, engine, engine.version)

    def _end(self, engine: _Engine, version: int) -> None:
        if version != engine.version or engine.name not in self._engines:
            return
        assert engine.step is not None
        outcome = engine.core.end(engine.step.steps)
        engine.step = None
        for name, cached in outcome.started:
            record, claim = engine.live[name]
            record.first, record.cached = self.now, cached
            claim.started()
        for name in outcome.finished:
            record, claim = engine.live.pop(name)
            record.end = self.now
            claim.ended()
        self._publish(engine, outcome)
        if engine.core.busy:
            self._start(engine)

    def _publish(self, engine: _Engine, outcome: Outcome) -> None:
        load = None
        if self.now - engine.published >= self.spec.load_interval or not engine.core.busy:
            engine.published = self.now
            load = engine.core.load()
        if load is not None or outcome.stored or outcome.removed:
            self._at(self.now + self.spec.event_lag, self._deliver, engine.name, outcome, load, self.now)

    def _deliver(self, engine: str, outcome: Outcome, load: LoadReport | None, sent: float) -> None:
        for router in self._routers:
            router.hear(engine, outcome, load, self.now - sent, self.spec.block_size)


def capacity(spec: FleetSpec, workload: Sequence[Arrival]) -> float:
    """Requests per second that the fleet completes when each engine in turn gets the next of ``workload`` and
    is never idle: the middle 80 % of one run in which all arrive at once.
    """
    from npufleet.cluster.router.policies.round_robin import RoundRobin

    fleet = VirtualFleet(spec, RoundRobin)
    records = fleet.run(
        Arrival(at=0.0, prompt=item.prompt, output_tokens=item.output_tokens) for item in workload
    )
    ends = sorted(record.end for record in records)
    low, high = len(ends) // 10, len(ends) * 9 // 10
    return (high - low) / (ends[high] - ends[low])
