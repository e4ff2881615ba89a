"""How well several router processes agree with one: ``python -m benchmarks.routing.agreement TRACE``.

Each request goes to one of N routers in turn, which knows its own requests and what the engines publish. Beside them
a router that sees everything (as the only one would) is asked for its pick at the same moment. Counted are the picks
that are the same, and what the others cost by that router's own estimate. Simulated engines, real routing code.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from npufleet.cluster.bench.trace import read
from npufleet.cluster.router.base import LoadReport, Policy, RequestInfo, decide
from npufleet.cluster.router.decider import Claim
from npufleet.cluster.router.ledger import Ledger, Share
from npufleet.cluster.sim.base import Outcome
from npufleet.cluster.sim.fleet import (
    _REPORT_TTL,
    MODEL,
    FleetSpec,
    Record,
    VirtualFleet,
    _Router,
    capacity,
)
from npufleet.cluster.sim.timing import DEFAULT_PRESET, preset

from .study import BlockPrompt, policies, sum_up, workload

ROUTERS = (1, 2, 4, 8, 16)


class _Both:
    """One request's claim at the router that has it, and at the one that sees everything."""

    def __init__(self, own: Claim, all_seeing: Claim) -> None:
        self._claims = (own, all_seeing)

    def started(self) -> None:
        for claim in self._claims:
            claim.started()

    def ended(self) -> None:
        for claim in self._claims:
            claim.ended()


class WatchedFleet(VirtualFleet):
    """A fleet whose picks are compared with those of a router that sees all requests."""

    def __init__(self, spec: FleetSpec, policy: Callable[[], Policy], *, share: bool) -> None:
        """``share``: the routers see at once what each other has on the engines, as processes on one port do."""
        self._share = share
        self.same: list[bool] = []
        self.excess: list[
            float
        ] = []  # of picks that differ: the cost above the best one's, by the policy's measure
        self._seer = _Router(policy(), lambda: self.now, spec.block_size)
        super().__init__(spec, policy)

    def _join(self, place: int, life: int) -> None:
        super()._join(place, life)
        name = f"e{place}.{life}"
        self._seer.ledgers[name] = Ledger(name, lambda: self.now)
        if self._share:
            for router in self._routers:
                others = [other for other in self._routers if other is not router]
                router.ledgers[name] = Ledger(name, lambda: self.now, partial(_sum, others, name))

    def _arrive(self, record: Record) -> None:
        arrival = record.arrival
        info = RequestInfo(
            model=MODEL,
            prompt_tokens=arrival.prompt.length,
            session=arrival.session,
            prompt=arrival.prompt,
        )
        decider = self._seer.decider
        loads = decider.look(MODEL, info, list(self._seer.ledgers.values()), _REPORT_TTL)
        best = decide(decider.policy, info, loads, len(self.same))
        super()._arrive(record)
        chosen = next(load for load in loads if load.engine_id == record.engine)
        gap = decider.policy.score(info, chosen) - decider.policy.score(info, best)
        self.same.append(gap <= 1e-9)
        if gap > 1e-9:
            self.excess.append(gap)
        ledger = self._seer.ledgers[record.engine]
        seen = Claim(decider, decider._model(MODEL), ledger, chosen, info)
        live = self._engines[record.engine].live
        name = next(reversed(live))
        live[name] = (record, _Both(live[name][1], seen))  # type: ignore[assignment]

    def _deliver(self, engine: str, outcome: Outcome, load: LoadReport | None, sent: float) -> None:
        super()._deliver(engine, outcome, load, sent)
        self._seer.hear(engine, outcome, load, self.now - sent, self.spec.block_size)


def _sum(routers: list[_Router], name: str) -> Share:
    """What ``routers`` have on an engine together."""
    shares = [router.ledgers[name].share() for router in routers]
    return Share(*map(sum, zip(*shares, strict=True))) if shares else Share()


def main() -> None:
    """Measure and print a table."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("trace", type=Path)
    made.add_argument("--requests", type=int, default=4000)
    made.add_argument("--engines", type=int, default=16)
    made.add_argument("--load", type=float, default=0.9, help="of the fleet's capacity (default %(default)s)")
    made.add_argument("--policies", nargs="+", default=["predicted-ttft", "precise-prefix", "least-load"])
    args = made.parse_args()
    trace = read(args.trace)[: args.requests]
    prompts = [BlockPrompt(one) for one in trace]
    spec = FleetSpec(engines=args.engines, device=preset(DEFAULT_PRESET))
    rate = args.load * capacity(spec, workload(trace, prompts, 1.0))
    arrivals = workload(trace, prompts, rate)
    print(f"{len(arrivals)} requests, {args.engines} engines, {args.load:g} of their capacity\n")
    print(
        "| policy | routers | told each other | same pick | median excess of others | TTFT mean / p90 s | hit rate |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.policies:
        for routers, share in [(n, share) for n in ROUTERS for share in (False, True) if n > 1 or not share]:
            began = time.monotonic()
            fleet = WatchedFleet(replace(spec, routers=routers), policies()[name], share=share)
            result = sum_up(fleet.run(arrivals), name, args.engines, args.load)
            excess = statistics.median(fleet.excess) if fleet.excess else 0.0
            told = "yes" if share else "no"
            print(
                f"| {name} | {routers} | {told} | {statistics.fmean(fleet.same):.1%} | {excess:.3g} "
                f"| {result.ttft_mean:.2f} / {result.ttft_p90:.2f} | {result.hit_rate:.1%} |",
                flush=True,
            )
            print(f"{name}, {routers} routers: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
