"""Drive the block-level model and vLLM's own scheduler with the same requests; prints how they differ as JSON.

Run as a program in a process that is set up as a gateway's: ``sim_compare.py BLOCKS``.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

BLOCK = 128


def requests(count: int):
    """Arrivals of prompts that share beginnings, with their blocks' keys."""
    from npufleet.cluster.sim.base import SimRequest

    chance = random.Random(3)
    stems = [[chance.randrange(250) for _ in range(3000)] for _ in range(6)]
    made = []
    for number in range(count):
        ids = chance.choice(stems)[: chance.randrange(200, 3000)]
        ids = ids + [chance.randrange(250) for _ in range(chance.randrange(10, 600))]
        keys = [hash(tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        made.append(
            (
                number * chance.uniform(0, 0.3),
                SimRequest(
                    request_id=str(number),
                    prompt_tokens=len(ids),
                    output_tokens=chance.randrange(1, 200),
                    token_ids=ids,
                    keys=keys,
                ),
            )
        )
    return sorted(made, key=lambda pair: pair[0])


def drive(core, arrivals):
    """When each request got its first token and ended, how much of it was cached, and how many preemptions."""
    now, at, preempted = 0.0, 0, 0
    first, end, cached = {}, {}, {}
    while at < len(arrivals) or core.busy:
        if not core.busy:
            now = max(now, arrivals[at][0])
        while at < len(arrivals) and arrivals[at][0] <= now:
            core.add(arrivals[at][1])
            at += 1
        step = core.begin()
        count = step.done_by(arrivals[at][0] - now) if at < len(arrivals) else step.steps
        now += step.seconds(count)
        outcome = core.end(count)
        preempted += outcome.preempted
        for name, tokens in outcome.started:
            first[name], cached[name] = now, tokens
        end.update(dict.fromkeys(outcome.finished, now))
    return first, end, cached, preempted


def main(blocks: int) -> None:
    from npufleet.cluster.gateway.process import prepare_process

    prepare_process()
    from npufleet.cluster.sim import tokenizer
    from npufleet.cluster.sim.blocks import BlockCore
    from npufleet.cluster.sim.scheduler import SchedulerCore, engine_config
    from npufleet.cluster.sim.timing import preset

    device = replace(preset("a3-qwen3-32b-tp4"), kv_tokens=BLOCK * blocks, max_batched_tokens=2048)
    arrivals = requests(120)
    with tempfile.TemporaryDirectory() as folder:
        model = tokenizer.write(Path(folder), 8192)
        real = drive(SchedulerCore(engine_config(model, device, BLOCK, max_model_len=8192), device), arrivals)
    model_of_it = drive(BlockCore(device, BLOCK), arrivals)
    names = [request.request_id for _, request in arrivals]
    print(
        json.dumps(
            {
                "first": max(abs(real[0][n] - model_of_it[0][n]) for n in names),
                "end": max(abs(real[1][n] - model_of_it[1][n]) for n in names),
                "cached": sum(real[2][n] != model_of_it[2][n] for n in names),
                "hits": sum(tokens > 0 for tokens in real[2].values()),
                "seconds": max(real[1].values()),
                "preempted": [real[3], model_of_it[3]],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
