"""torch.distributed over HCCL on virtual NPUs: every collective and data type against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .hccl_launch import Place, values
from .hccl_torch import world

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
SIZES = (1, 1023, 300_000)


def _data(kind: str, rank: int, size: int) -> torch.Tensor:
    """The same numbers on every rank that asks for ``rank``'s, on the CPU."""
    import torch

    source = torch.Generator().manual_seed(1000 * rank + size)
    if kind in FLOATS:
        return torch.randn(size, generator=source).to(getattr(torch, kind))
    return torch.randint(0, 3, (size,), generator=source).to(getattr(torch, kind))


def _reduced(kind: str, op: str, ranks: int, size: int) -> torch.Tensor:
    """In rank order, halves in fp32 and rounded once."""
    import torch

    wide = torch.float32 if kind in FLOATS else torch.int64
    result = _data(kind, 0, size).to(wide)
    for rank in range(1, ranks):
        other = _data(kind, rank, size).to(wide)
        result = {
            "SUM": torch.add,
            "PRODUCT": torch.mul,
            "MAX": torch.maximum,
            "MIN": torch.minimum,
        }[op](result, other)
    return result.to(getattr(torch, kind))


def _all_reduces(place: Place) -> list[str]:
    """Names of what came out wrong."""
    import torch
    import torch.distributed as dist

    wrong = []
    for kind in FLOATS + INTEGERS:
        for op in ("SUM", "PRODUCT", "MAX", "MIN"):
            for size in SIZES if op == "SUM" else SIZES[:2]:
                if kind == "int16" and op != "SUM":
                    continue
                tensor = _data(kind, place.rank, size).npu()
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                if not torch.equal(tensor.cpu(), _reduced(kind, op, place.ranks, size)):
                    wrong.append(f"all_reduce {kind} {op} {size}")
    flags = torch.tensor([True, False, place.rank == 0]).npu()
    dist.all_reduce(flags)
    if flags.tolist() != [True, False, True]:
        wrong.append("all_reduce bool")
    mean = torch.full((4,), float(place.rank)).npu()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if mean.tolist() != [(place.ranks - 1) / 2] * 4:
        wrong.append("all_reduce AVG")
    tensor = _data("float32", place.rank, 777).npu()
    dist.reduce(tensor, place.ranks - 1)
    own = place.rank == place.ranks - 1
    expected = _reduced("float32", "SUM", place.ranks, 777) if own else _data("float32", place.rank, 777)
    if not torch.equal(tensor.cpu(), expected):
        wrong.append("reduce")
    return wrong


def _moves(place: Place) -> list[str]:
    """Gathers, scatters and broadcasts of every type."""
    import torch
    import torch.distributed as dist

    wrong, ranks = [], range(place.ranks)
    for kind in (*FLOATS, *INTEGERS, "bool"):
        for size in (1, 1023, 300_000) if kind in ("float32", "int8") else (5,):
            everything = [_data("int64" if kind == "bool" else kind, r, size) for r in ranks]
            if kind == "bool":
                everything = [t > 0 for t in everything]
            mine = everything[place.rank].npu()

            gathered = torch.empty(place.ranks * size, dtype=mine.dtype).npu()
            dist.all_gather_into_tensor(gathered, mine)
            parts = [torch.empty_like(mine) for _ in ranks]
            dist.all_gather(parts, mine)
            sent = mine.clone()
            dist.broadcast(sent, place.ranks - 1)
            got = torch.empty_like(mine)
            dist.scatter(got, [t.npu() for t in everything] if place.rank == 0 else None, src=0)
            for name, result, expected in (
                ("all_gather_into_tensor", gathered, torch.cat(everything)),
                ("all_gather", torch.cat(parts), torch.cat(everything)),
                ("broadcast", sent, everything[-1]),
                ("scatter", got, everything[place.rank]),
            ):
                if not torch.equal(result.cpu(), expected):
                    wrong.append(f"{name} {kind} {size}")
    uneven = [torch.empty(3 + r).npu() for r in ranks]
    dist.all_gather(uneven, torch.full((3 + place.rank,), float(place.rank)).npu())
    if any(t.tolist() != [float(r)] * (3 + r) for r, t in enumerate(uneven)):
        wrong.append("all_gather of unequal sizes")
    return wrong


def _exchanges(place: Place) -> list[str]:
    """Reduce-scatter, all-to-all even and uneven, messages."""
    import torch
    import torch.distributed as dist

    wrong, n, me = [], place.ranks, place.rank
    for kind in (*FLOATS, "int32"):
        for size in (1, 50_001):
            out = torch.empty(size, dtype=getattr(torch, kind)).npu()
            dist.reduce_scatter_tensor(out, _data(kind, me, size * n).npu())
            if not torch.equal(out.cpu(), _reduced(kind, "SUM", n, size * n)[me * size : (me + 1) * size]):
                wrong.append(f"reduce_scatter_tensor {kind} {size}")
    for scale in (1, 40_000):
        # Rank i sends (i + 2 j) * scale numbers to rank j: none at all from rank 0 to itself.
        send = [(me + 2 * j) * scale for j in range(n)]
        receive = [(i + 2 * me) * scale for i in range(n)]
        data = torch.cat([torch.full((send[j],), 10 * me + j, dtype=torch.int32) for j in range(n)]).npu()
        out = torch.empty(sum(receive), dtype=torch.int32).npu()
        dist.all_to_all_single(out, data, receive, send)
        expected = [torch.full((receive[i],), 10 * i + me, dtype=torch.int32) for i in range(n)]
        parts = [torch.empty(count, dtype=torch.int32).npu() for count in receive]
        dist.all_to_all(parts, list(data.split(send)))
        even = torch.empty(n * scale, dtype=torch.int32).npu()
        dist.all_to_all_single(even, torch.arange(n).repeat_interleave(scale).int().npu() + 10 * me)
        if not torch.equal(out.cpu(), torch.cat(expected)):
            wrong.append(f"all_to_all_single uneven {scale}")
        if not all(torch.equal(a.cpu(), b) for a, b in zip(parts, expected, strict=True)):
            wrong.append(f"all_to_all {scale}")
        if even.tolist() != [10 * i + me for i in range(n) for _ in range(scale)]:
            wrong.append(f"all_to_all_single even {scale}")
    for size in (3, 200_000):
        outgoing, incoming = torch.full((size,), float(me)).npu(), torch.empty(size).npu()
        before, after = (me - 1) % n, (me + 1) % n
        pair = [dist.P2POp(dist.isend, outgoing, after), dist.P2POp(dist.irecv, incoming, before)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
        if incoming.tolist() != [float(before)] * size:
            wrong.append(f"batch_isend_irecv {size}")
        if me == 0:
            dist.send(outgoing, 1)
        if me == 1:
            dist.recv(incoming, 0)
            if incoming.tolist() != [0.0] * size:
                wrong.append(f"send and recv {size}")
    return wrong


def _objects_and_groups(place: Place) -> list[str]:
    """Pickled objects, and groups that overlap: several communicators at once in each process."""
    import torch
    import torch.distributed as dist

    wrong = []
    things: list[Any] = [None] * place.ranks
    dist.all_gather_object(things, {"rank": place.rank})
    if things != [{"rank": r} for r in range(place.ranks)]:
        wrong.append("all_gather_object")
    shared = [f"from {place.rank}"]
    dist.broadcast_object_list(shared, src=1)
    if shared != ["from 1"]:
        wrong.append("broadcast_object_list")
    members = [[r, (r + 1) % place.ranks] for r in range(place.ranks)] + [[place.ranks - 1]]
    groups = [dist.new_group(m) for m in members]
    for _ in range(3):
        for ranks, group in zip(members, groups, strict=True):
            if place.rank in ranks:
                tensor = torch.tensor([10.0**place.rank]).npu()
                dist.all_reduce(tensor, group=group)
                if tensor.item() != sum(10.0**r for r in set(ranks)):
                    wrong.append(f"group {ranks}")
    dist.barrier()
    return wrong


def _everything(place: Place) -> dict[str, list[str]]:
    import torch.distributed as dist

    found = {step.__name__: step(place) for step in (_all_reduces, _moves, _exchanges, _objects_and_groups)}
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_equal_plain_torch(ranks: int) -> None:
    for found in values(world(_everything, ranks)):
        assert found == {name: [] for name in found}
