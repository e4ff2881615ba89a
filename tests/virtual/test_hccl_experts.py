"""Dispatch and combine of experts between processes, on a communicator of their own that is found by its name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .hccl_launch import Place, errors, values
from .hccl_torch import message, world

EXPERTS, HIDDEN, TOP_K, TOKENS = 8, 64, 3, 6


def _group(place: Place, buffer: int | None = None) -> Any:
    """A communicator for the operators alone."""
    import torch.distributed as dist
    import torch_npu

    from npufleet.kernels.distribute_limits import Distribution
    from npufleet.kernels.ops import moe_distribute as ops

    options = None
    if buffer is not None:
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer}
    made = dist.new_group(list(range(place.ranks)), backend="hccl", pg_options=options)
    layout = Distribution(
        generation="A2", algorithm="fullmesh", ranks=place.ranks, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN
    )
    return ops.ExpertGroup(name=ops.communicator_name(made), rank=place.rank, layout=layout)


def _tokens(rank: int, count: int, seed: int = 0) -> Any:
    import torch

    draw = torch.Generator().manual_seed(100 * seed + rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(count)]).int()
    return torch.randn(count, HIDDEN, generator=draw), ids, torch.rand(count, TOP_K, generator=draw)


def _layer(x: Any, ids: Any, weights: Any, group: Any, largest: int, quantize: bool = False) -> Any:
    """Expert e multiplies its rows with e + 1."""
    import torch

    from npufleet.kernels.ops import moe_distribute as ops

    sent = ops.dispatch(x, ids, weights, group, largest=largest, quantize=quantize)
    local = group.layout.local_experts
    # Static shapes: the factor of each row from the running sums, rows beyond the last get one too.
    number = (torch.arange(sent.rows.shape[0], device="npu")[:, None] >= sent.counts.cumsum(0)).sum(1)
    rows = sent.rows.float() * (sent.row_scales[:, None] if quantize else 1.0)
    rows = rows * (number + 1 + group.rank * local)[:, None]
    return ops.combine(rows.to(x.dtype), ids, weights, sent, group, largest=largest)


def _error(out: Any, case: Any) -> float:
    """Largest distance from the formula, relative to the largest value."""
    x, ids, weights = case
    wanted = x * (weights * (ids + 1)).sum(1, keepdim=True)
    return float((out.float().cpu() - wanted).abs().max() / wanted.abs().max())


def _everything(place: Place) -> dict[str, Any]:
    import torch

    from npufleet.kernels.virtual import counters

    group = _group(place)
    found: dict[str, Any] = {}
    for name, dtype, quantize, counts in (
        ("fp32", torch.float32, False, [TOKENS] * place.ranks),
        ("bf16", torch.bfloat16, False, [TOKENS] * place.ranks),
        ("int8", torch.bfloat16, True, [TOKENS] * place.ranks),
        ("uneven", torch.float32, False, list(range(1, place.ranks + 1))),
    ):
        case = _tokens(place.rank, counts[place.rank])
        x, ids, weights = (part.npu() for part in case)
        counters.reset()
        out = _layer(x.to(dtype), ids, weights, group, max(counts), quantize)
        assert not any(counters.read().syncs.values())  # nothing is read on the host
        found[name] = _error(out, case)
    found["graph"] = _replays(place, group)
    return found


def _replays(place: Place, group: Any) -> list[float]:
    """Tokens and choices change between replays, so the numbers of rows do too."""
    import torch

    x, ids, weights = (part.npu() for part in _tokens(place.rank, TOKENS))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = _layer(x, ids, weights, group, TOKENS)
    distances = []
    for seed in (1, 2, 3):
        case = _tokens(place.rank, TOKENS, seed)
        for into, part in zip((x, ids, weights), case, strict=True):
            into.copy_(part)
        graph.replay()
        distances.append(_error(out, case))
    return distances


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tokens_move_between_processes_eager_and_in_graphs(ranks: int) -> None:
    for found in values(world(_everything, ranks)):
        assert found["fp32"] < 1e-6 and found["uneven"] < 1e-6
        assert found["bf16"] < 0.02 and found["int8"] < 0.03
        assert max(found["graph"]) < 1e-6


def _faults(place: Place) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    from npufleet.kernels.ops import moe_distribute as ops

    x, ids, weights = (part.npu() for part in _tokens(place.rank, TOKENS))
    dist.all_reduce(torch.ones(1, device="npu"))
    world_group = dist.group.WORLD
    assert world_group is not None
    of_world = _group(place)
    shared = ops.ExpertGroup(name=ops.communicator_name(world_group), rank=place.rank, layout=of_world.layout)
    nobody = ops.ExpertGroup(name="nobody", rank=place.rank, layout=of_world.layout)
    found = {
        "used": message(lambda: _layer(x, ids, weights, shared, TOKENS)),
        "unknown": message(lambda: _layer(x, ids, weights, nobody, TOKENS)),
    }
    small = _group(place, buffer=3)
    try:
        _layer(x, ids, weights, small, TOKENS)
    except ValueError as error:
        found["small"] = str(error)
    _layer(x, ids, weights, of_world, TOKENS)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        _layer(x, ids, weights, of_world, TOKENS)
    graph.replay()
    if place.rank == 1:
        place.die()
    found["death"] = message(graph.replay)
    return found


def test_errors_name_what_is_wrong() -> None:
    survivor, victim = world(_faults, 2)
    assert not victim.finished
    (found,) = values([survivor])
    assert re.search(
        r"has run HcclAllReduce before: dispatch and combine of experts want one of their own", found["used"]
    )
    assert "no communicator of this process is called 'nobody'" in found["unknown"]
    assert re.search(r"need a buffer of 4203520 bytes, \S+ has 3145728: raise HCCL_BUFFSIZE", found["small"])
    assert re.search(r"rank 1 \(pid \d+\) died during MoeDistributeDispatch", found["death"])


def _one_is_late(place: Place) -> str:
    import time

    group = _group(place)
    x, ids, weights = (part.npu() for part in _tokens(place.rank, TOKENS))
    _layer(x, ids, weights, group, TOKENS)
    if place.rank == 1:
        time.sleep(6)
    _layer(x, ids, weights, group, TOKENS)
    return "done"


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    for text in errors(world(_one_is_late, 2, {"HCCL_EXEC_TIMEOUT": "2"})):
        assert re.search(r"MoeDistributeDispatch counts on communicator .* was not finished within 2 s", text)
        assert "rank 1 (pid" in text
