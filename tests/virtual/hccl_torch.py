"""Runs a function as several ranks of a torch.distributed world with backend hccl on virtual NPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .hccl_launch import Outcome, Place, launch


@dataclass(frozen=True, kw_only=True)
class _World:
    work: Callable[[Place], Any]

    def __call__(self, place: Place) -> Any:
        import torch
        import torch.distributed as dist

        torch.npu.set_device(place.rank)
        torch.set_num_threads(1)
        store = f"file://{place.folder}/store"
        dist.init_process_group("hccl", init_method=store, rank=place.rank, world_size=place.ranks)
        return self.work(place)


def world(
    work: Callable[[Place], Any], ranks: int, environment: dict[str, str] | None = None
) -> list[Outcome]:
    """Run ``work`` as ``ranks`` ranks of one world; each has the virtual NPU of its number."""
    # Importing torch and vLLM's neighbours takes long on a busy machine.
    return launch(_World(work=work), ranks, environment, seconds=300)


def message(call: Callable[[], Any]) -> str:
    """The text of the RuntimeError that ``call`` raises. Fails when it raises none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no RuntimeError")
