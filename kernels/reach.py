"""``python -m npufleet.kernels.reach``: one rank of a small all-reduce over HCCL, to see whether hosts meet.

Prints one JSON object a line: each stage with its seconds as it is passed, so that a rank that hangs tells by its
last line what it hung in. Stages: ``device`` (the NPU is open), ``joined`` (all ranks met), ``reduced`` (the sum over
all ranks is right; the first collective is where HCCL connects), ``timed`` (with the bytes per second of the bus).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMED_BYTES = 16 << 20
TIMED_RUNS = 5


def main(arguments: list[str] | None = None) -> int:
    """Run one rank; 0 if all stages were passed, 1 if the sum is wrong."""
    parser = argparse.ArgumentParser(prog="python -m npufleet.kernels.reach", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--master", required=True, help="HOST:PORT on which rank 0 listens for the others")
    parser.add_argument("--npu", type=int, default=0, help="index of the NPU among those that are visible")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each step (default %(default)s)")
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end when standard input does: whoever asked is gone"
    )
    options = parser.parse_args(arguments)
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    return 0 if reach(options.rank, options.world, options.master, options.npu, options.seconds) else 1


def reach(rank: int, world: int, master: str, npu: int, seconds: float) -> bool:
    """Join the other ranks, sum over all, and say whether the sum is right.

    Args:
        rank: this rank, from 0.
        world: number of ranks.
        master: HOST:PORT of rank 0.
        npu: index of the NPU among those that are visible.
        seconds: deadline of each step.

    Raises:
        RuntimeError: if a step fails or misses its deadline.
    """
    began = time.monotonic()
    device = torch.device("npu", npu)
    torch.npu.set_device(device)
    torch.zeros(1, device=device)
    _passed("device", began)
    dist.init_process_group(
        "hccl",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        _passed("joined", began)
        one = torch.full((4,), float(rank + 1), device=device)
        dist.all_reduce(one)
        wanted = world * (world + 1) / 2
        if not bool((one.cpu() == wanted).all()):
            print(json.dumps({"wrong": one.cpu().tolist(), "wanted": wanted}), flush=True)
            return False
        _passed("reduced", began)
        _passed("timed", began, bus_bytes_per_s=round(_bandwidth(device, world)))
        return True
    finally:
        dist.destroy_process_group()


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os._exit(1)


def _bandwidth(device: torch.device, world: int) -> float:
    """Bytes per second on the busiest link of a ring: 2 (n - 1) / n of the buffer each run."""
    buffer = torch.zeros(TIMED_BYTES // 4, device=device)
    dist.all_reduce(buffer)
    torch.npu.synchronize()
    began = time.monotonic()
    for _ in range(TIMED_RUNS):
        dist.all_reduce(buffer)
    torch.npu.synchronize()
    return TIMED_RUNS * TIMED_BYTES * 2 * (world - 1) / world / (time.monotonic() - began)


def _passed(stage: str, began: float, **more: float) -> None:
    print(json.dumps({"stage": stage, "seconds": round(time.monotonic() - began, 2), **more}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
