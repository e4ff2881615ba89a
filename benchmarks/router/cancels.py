"""How long a client's cancel takes to reach the engine, by the phase that the request is in.

``python -m benchmarks.router.cancels`` runs client, router and an engine without a model in one process and takes the
time from the client's cancel to the end of the engine's handler, with 64 other streams running.
"""

from __future__ import annotations

import statistics
import time

import uvloop

from tests.cluster.router_fakes import FakeEngine, Fleet, fleet, generate_request, until

ROUNDS = 200


async def measure(f: Fleet, engine: FakeEngine, phase: str) -> list[float]:
    """Milliseconds of each cancel."""
    took = []
    for number in range(ROUNDS):
        name = f"{phase}-{number}"
        call = f.stub.Generate(generate_request(10**6, (1, 2, 3), name))
        if phase == "between tokens":
            await call.read()
            await call.read()
        else:
            await until(lambda name=name: any(request.request_id == name for request in engine.seen[-70:]))
        start = time.perf_counter()
        call.cancel()
        await until(lambda name=name: name in engine.cancelled[-70:])
        took.append((time.perf_counter() - start) * 1000)
    return took


async def main() -> None:
    """Measure and print."""
    busy, silent = FakeEngine(name="a", delay=0.01), FakeEngine(name="b", delay=3600)
    print("| phase | median ms | p99 ms |\n|---|---|---|")
    for phase, engine in (("between tokens", busy), ("silent prefill", silent)):
        async with fleet(engine) as f:
            others = [f.stub.Generate(generate_request(10**6, (1,), f"other-{i}")) for i in range(64)]
            await until(lambda engine=engine: len(engine.seen) >= 64)
            took = sorted(await measure(f, engine, phase))
            print(
                f"| {phase} | {statistics.median(took):.1f} | {took[int(len(took) * 0.99)]:.1f} |", flush=True
            )
            for other in others:
                other.cancel()


if __name__ == "__main__":
    uvloop.run(main())
