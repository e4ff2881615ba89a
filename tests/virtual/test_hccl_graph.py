"""Collectives and messages inside a captured graph run again at each replay."""

from __future__ import annotations

import re
from typing import Any

from .hccl_launch import Place, values
from .hccl_torch import message, world


def _graph(place: Place) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    n = place.ranks
    x = torch.full((1000,), 1.0).npu()
    token = torch.zeros(4).npu()
    dist.all_reduce(x.clone())  # communicators are made outside the graph, as on a device
    _pass_on(place, token)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        dist.all_reduce(doubled)
        gathered = torch.empty(n * 1000, device="npu")
        dist.all_gather_into_tensor(gathered, doubled + place.rank)
        result = gathered.view(n, 1000).sum(0) + 1
        _pass_on(place, token)

    found: dict[str, Any] = {"results": [], "tokens": []}
    for step in (1.0, 5.0):
        x.fill_(step * (place.rank + 1))
        token.fill_(100 * step + place.rank)
        graph.replay()
        found["results"].append(result[[0, 999]].tolist())
        found["tokens"].append(token.tolist())
    return found


def _pass_on(place: Place, token: torch.Tensor) -> None:  # noqa: F821
    import torch.distributed as dist

    if place.rank == 0:
        dist.send(token, 1)
    elif place.rank == 1:
        dist.recv(token, 0)


def test_replay_computes_with_the_inputs_of_the_moment() -> None:
    found = values(world(_graph, 2))
    for rank, one in enumerate(found):
        # all_reduce of 2 * step * (1 + 2), gathered from both ranks with the rank added, plus 1
        assert one["results"] == [[2 * 6 * step + 1 + 1] * 2 for step in (1.0, 5.0)]
        assert one["tokens"] == [[100 * step] * 4 for step in (1.0, 5.0)], rank


def _die_before_replay(place: Place) -> list[str]:
    import torch
    import torch.distributed as dist

    x = torch.ones(4).npu()
    dist.all_reduce(x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        dist.all_reduce(x)
    graph.replay()
    if place.rank == 1:
        place.die()
    return [message(lambda: _replay_and_wait(graph))]


def _replay_and_wait(graph: Any) -> None:
    import torch

    graph.replay()
    torch.npu.synchronize()


def test_rank_that_dies_before_a_replay_is_named() -> None:
    survivor, victim = world(_die_before_replay, 2)
    assert not victim.finished
    assert survivor.error is None, survivor.trace
    assert re.search(r"rank 1 \(pid \d+\) died during HcclAllReduce", survivor.value[0])
