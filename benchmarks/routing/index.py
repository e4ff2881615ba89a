"""``python -m benchmarks.routing.index``: what a look-up in the prefix index costs, and that its memory stays flat.

Look-ups: 1,000 engines, prompts of 12,000 tokens (the mean of the Mooncake conversation trace), medians over many
prompts. Memory: a million requests through engines whose caches hold far less, each block stored and later
removed as an engine does; the process's resident memory is read on the way.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections import OrderedDict

from npufleet.cluster.router.base import RequestInfo, decide
from npufleet.cluster.router.decider import ALL, BEST, Decider
from npufleet.cluster.router.ledger import Ledger
from npufleet.cluster.router.prefix.base import Some
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.prompt import TokenPrompt, pack
from npufleet.cluster.router.registry import load_policy

BLOCK = 128
MODEL = "m"


def filled(engines: int, blocks: int) -> tuple[Decider, list[TokenPrompt]]:
    """A decider whose index knows ``blocks`` blocks of each engine; all engines share one system prompt of 8
    blocks, groups of ten share conversations.
    """
    chance = random.Random(1)
    decider = Decider(load_policy("predicted-ttft"))
    index = decider.index(MODEL)
    assert index is not None
    system = [chance.randrange(100_000) for _ in range(8 * BLOCK)]
    prompts = [
        TokenPrompt(tokens=pack([*system, *(chance.randrange(100_000) for _ in range(12_000 - len(system)))]))
        for _ in range(max(1, engines // 10))
    ]
    for number in range(engines):
        name = f"engine-{number:04d}"
        keys = prompts[number // 10 % len(prompts)].keys(BLOCK)
        index.stored(name, [(key, key) for key in keys[:blocks]], block_size=BLOCK)
        rest = max(0, blocks - len(keys))
        index.stored(
            name, [(chance.getrandbits(60), chance.getrandbits(60)) for _ in range(rest)], block_size=BLOCK
        )
    return decider, prompts


def lookups(engines: int, blocks: int) -> None:
    """Print what the parts of a decision cost."""
    decider, prompts = filled(engines, blocks)
    index = decider.index(MODEL)
    assert index is not None
    ledgers = [Ledger(f"engine-{number:04d}") for number in range(engines)]
    policy = decider.policy
    times: dict[str, list[float]] = {"keys": [], "match": [], "snapshot": [], "policy": []}
    for prompt in prompts * max(1, 300 // len(prompts)):
        fresh = TokenPrompt(tokens=prompt.tokens)
        begun = time.perf_counter()
        fresh.keys(BLOCK)
        times["keys"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        found = index.match(fresh, Some(BEST, ()) if engines > ALL else None)
        times["match"].append(time.perf_counter() - begun)
        assert len(found) == min(engines, BEST if engines > ALL else engines)
        info = RequestInfo(model=MODEL, prompt_tokens=fresh.length, prompt=fresh)
        begun = time.perf_counter()
        loads = decider.look(MODEL, info, ledgers, 5.0)
        times["snapshot"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        decide(policy, info, loads, 0)
        times["policy"].append(time.perf_counter() - begun)
    parts = ", ".join(f"{name} {statistics.median(values) * 1e6:.0f}" for name, values in times.items())
    print(f"{engines:5d} engines, {index.blocks:8,d} distinct blocks; median us: {parts}", flush=True)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(requests: int, engines: int, cache: int) -> None:
    """Print resident memory while ``requests`` requests go by."""
    chance = random.Random(2)
    index = PrefixIndex(max_blocks=200_000, linger=0.0)
    held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
    for number in range(requests + 1):
        if number % (requests // 10) == 0:
            print(
                f"{number:9,d} requests: {resident() / 2**20:6.0f} MiB, {index.blocks:7,d} blocks,"
                f" {index.expected} expected",
                flush=True,
            )
        stem = chance.randrange(5000)
        tokens = pack([stem] * BLOCK + [chance.randrange(100_000)] * BLOCK + [number % 2**32] * BLOCK)
        prompt = TokenPrompt(tokens=tokens)
        index.match(prompt)
        place = chance.randrange(engines)
        name, cached = f"e{place}", held[place]
        ticket = index.expect(name, prompt)
        fresh = [key for key in prompt.keys(BLOCK) if key not in cached]
        index.stored(name, [(key, key) for key in fresh], block_size=BLOCK)
        cached.update(dict.fromkeys(fresh))
        gone = [cached.popitem(last=False)[0] for _ in range(max(0, len(cached) - cache))]
        index.removed(name, gone)
        index.started(ticket)
        index.ended(ticket)


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.index", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=1000, help="of each engine (default %(default)s)")
    args = parser.parse_args()
    for engines in (10, 100, 1000):
        lookups(engines, args.blocks)
    memory(args.requests, engines=64, cache=1000)


if __name__ == "__main__":
    main()
