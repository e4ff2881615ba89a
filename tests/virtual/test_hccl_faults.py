"""What torch raises when ranks die, stay away or disagree."""

from __future__ import annotations

import re
import time

from .hccl_launch import Place
from .hccl_torch import message, world


def _faults(place: Place) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    wrong_count, absent = dist.new_group([0, 1]), dist.new_group([0, 1])
    ones = torch.ones(8).npu()
    found = {}

    data = torch.full((4 + place.rank,), 7.0).npu()
    found["count"] = message(lambda: dist.all_reduce(data, group=wrong_count))
    assert data.tolist() == [7.0] * (4 + place.rank), "data was touched"
    found["count again"] = message(lambda: dist.all_reduce(ones, group=wrong_count))

    dist.all_reduce(ones, group=absent)  # makes the communicator; the next misses a rank
    if place.rank == 0:
        found["absent"] = message(lambda: dist.all_reduce(ones, group=absent))
    else:
        time.sleep(3)
        found["late"] = message(lambda: dist.all_reduce(ones, group=absent))

    dist.barrier()  # the world is not harmed by what befell the groups
    if place.rank == 1:
        place.die()
    found["dead"] = message(lambda: dist.all_reduce(ones))
    found["dead again"] = message(lambda: dist.barrier())
    return found


def test_faults_are_runtime_errors_that_name_ranks() -> None:
    survivor, victim = world(_faults, 2, {"HCCL_EXEC_TIMEOUT": "2"})
    assert survivor.error is None, survivor.trace
    assert not victim.finished
    found = survivor.value
    expected = {
        "count": r"EI0005: HcclAllReduce on communicator \S+ .*: 4 on rank 0 \(pid \d+\), 5 on rank 1",
        "count again": r"the communicator has failed: EI0005",
        "absent": r"not finished within 2 s \(HCCL_EXEC_TIMEOUT\); not arrived: rank 1 \(pid \d+\)",
        "dead": r"rank 1 \(pid \d+\) died during HcclAllReduce on communicator \S+",
        "dead again": r"the communicator has failed: rank 1",
    }
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), (name, found[name])
