"""Which NPU a rank opens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.platforms import interface

from npufleet.plugin.worker import NPUWorker


def opened(local_rank: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    """The index that a worker with this local rank chooses among eight visible NPUs."""
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None, raising=False)
    worker = NPUWorker.__new__(NPUWorker)
    worker.rank, worker.local_rank = changes.pop("rank", local_rank), local_rank
    settings = SimpleNamespace(additional_config=changes.pop("additional_config", {}))
    worker.vllm_config = settings  # type: ignore[assignment]
    parallel = {
        "distributed_executor_backend": "mp",
        "data_parallel_backend": "mp",
        "nnodes_within_dp": 1,
        "data_parallel_rank_local": None,
        "data_parallel_index": 0,
        "world_size": 2,
        "assigned_physical_gpu_ids": None,
    }
    worker.parallel_config = SimpleNamespace(**{**parallel, **changes})  # type: ignore[assignment]
    return worker._visible_device()


@pytest.mark.parametrize(
    ("local_rank", "changes", "npu"),
    [
        (1, {}, 1),
        (1, {"data_parallel_rank_local": 2}, 5),
        (1, {"data_parallel_index": 1}, 3),
        (1, {"data_parallel_rank_local": 2, "assigned_physical_gpu_ids": [4, 5]}, 5),
        (1, {"data_parallel_rank_local": 1, "assigned_physical_gpu_ids": [7, 6, 3, 2]}, 2),
        (1, {"data_parallel_rank_local": 2, "distributed_executor_backend": "external_launcher"}, 1),
        (1, {"assigned_physical_gpu_ids": [0, 1], "additional_config": {"npus": [6, 4]}}, 4),
        (1, {"rank": 3, "assigned_physical_gpu_ids": [0, 1], "additional_config": {"npus": [6, 7, 2, 5]}}, 5),
    ],
    ids=[
        "alone",
        "third replica",
        "replica by index",
        "own devices",
        "devices of all replicas",
        "launched",
        "planned",
        "planned on two hosts",
    ],
)
def test_the_npu_of_a_rank(
    local_rank: int, changes: dict[str, Any], npu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(local_rank, monkeypatch, **changes) == npu


def test_a_rank_beyond_the_last_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"needs NPU 9 .* 8 visible.*lower tensor_parallel_size"):
        opened(1, monkeypatch, data_parallel_rank_local=4)


def test_groups_learn_which_device_the_worker_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(device=torch.device("npu", 0))
    monkeypatch.setattr(parallel_state, "_groups", {"tp:0": lambda: group, "left": lambda: None})
    worker = NPUWorker.__new__(NPUWorker)
    worker.device = torch.device("npu", 3)
    worker._tell_groups_the_device()
    assert group.device == torch.device("npu", 3)
