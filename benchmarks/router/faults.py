"""Faults under load: what clients notice when an engine dies, freezes, slows down or is cut off, or a router dies.

``python -m benchmarks.router.faults`` starts three mock engines and a router, each a process of its own, keeps 32
streams of 40 tokens running, does one thing to the system after two seconds and undoes it ten seconds later (forty for
an engine that says nothing, since clients wait for thirty). Each answer is checked token by token. Other routers are
installed into environments of their own; each has its defaults but for the policy, which looks at loads in all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.router.fault_clients import Notes, client, until_ready
from benchmarks.router.fault_system import TESTED, System, Tested, system

STREAMS = 32
FAULT_AT, LASTS, SILENCE_LASTS, AFTER = 2.0, 10.0, 40.0, 12.0  # seconds
RESTART = 1.0  # seconds until a supervisor would have started a router again
READY_SECONDS = 120.0

Action = Callable[[System], Awaitable[None]]


def _signal(number: signal.Signals) -> Action:
    async def act(system: System) -> None:
        system.engines[0].send(number)

    return act


async def _restart(system: System) -> None:
    await system.engines[0].start()


async def _cut(system: System) -> None:
    system.wire.cut()


async def _mend(system: System) -> None:
    system.wire.mend()


async def _hide(system: System) -> None:
    system.listing.rename(system.listing.with_suffix(".away"))


async def _show(system: System) -> None:
    system.listing.with_suffix(".away").rename(system.listing)


async def _kill_router(system: System) -> None:
    system.routers[0].send(signal.SIGKILL)


async def _start_router(system: System) -> None:
    await system.routers[0].start()


async def _bounce_router(system: System) -> None:
    await system.routers[0].end()
    await asyncio.sleep(RESTART)
    await system.routers[0].start()


async def _nothing(system: System) -> None:
    pass


PAUSED, CUT = "engine paused (SIGSTOP)", "network to an engine cut"
SHARED, LISTED = "one of two routers on a port killed", "list of engines away"
FAULTS: dict[str, tuple[Action, Action]] = {
    "engine killed": (_signal(signal.SIGKILL), _restart),
    PAUSED: (_signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
    "engine 20 times slower": (_signal(signal.SIGUSR1), _signal(signal.SIGUSR2)),
    CUT: (_cut, _mend),
    LISTED: (_hide, _show),
    SHARED: (_kill_router, _start_router),
    "the only router killed, started 1 s later": (_bounce_router, _nothing),
}
COLUMNS = (
    "fault", "router", "whole answers", "wrong", "streams broken off", "streams that just stop", "other errors",
    "last error after", "slowest whole answer", "answers a second, while it lasts",
    "first answer of the engine after healing",
)  # fmt: skip


async def run(name: str, tested: Tested) -> str:
    """One fault; returns its row of the table."""
    fault, heal = FAULTS[name]
    heal_at = FAULT_AT + (SILENCE_LASTS if name in (PAUSED, CUT) else LASTS)
    async with system(tested, 2 if name == SHARED else 1) as made:
        await until_ready(tested.speaks, made.address, READY_SECONDS)
        await asyncio.sleep(1)
        notes = Notes()
        clients = [
            asyncio.create_task(client(tested.speaks, made.address, i, notes, heal_at + AFTER))
            for i in range(STREAMS)
        ]
        await asyncio.sleep(FAULT_AT)
        await fault(made)
        await asyncio.sleep(heal_at - notes.now())
        await heal(made)
        healed = notes.now()
        await asyncio.gather(*clients)
    for at, text in notes.failed[:3]:
        print(f"  {name}, {tested.name}, {at:.2f} s: {text}", file=sys.stderr)
    return row(name, tested.name, notes, healed)


def row(name: str, router: str, notes: Notes, healed: float) -> str:
    """The row of a run."""
    errors = [at for at in (*notes.broken, *notes.silent, *(at for at, _ in notes.failed)) if at >= FAULT_AT]
    back = [end - healed for begin, end, engine in notes.whole if engine == "A" and begin > healed]
    rate = sum(FAULT_AT < end < healed for _, end, _ in notes.whole) / (healed - FAULT_AT)
    cells = (
        name,
        router,
        len(notes.whole),
        notes.wrong,
        len(notes.broken),
        len(notes.silent),
        len(notes.failed),
        f"{max(errors) - FAULT_AT:.1f} s" if errors else "-",
        f"{max(end - begin for begin, end, _ in notes.whole):.1f} s",
        f"{rate:.0f}",
        f"{min(back):.1f} s" if back else f"none in {AFTER:.0f} s",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


async def main(names: list[str], routers: list[str]) -> None:
    """Run the faults and print the table."""
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for name in names:
        for tested in TESTED:
            if tested.name not in routers or (name == SHARED and not tested.shares):
                continue
            if name == LISTED and not tested.follows:
                continue  # its list is its command line
            try:
                print(await run(name, tested), flush=True)
            except TimeoutError:
                print(f"| {name} | {tested.name} | did not become ready |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    known = [tested.name for tested in TESTED]
    parser.add_argument("--routers", nargs="+", choices=known, default=known, metavar="ROUTER")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.only, arguments.routers))
