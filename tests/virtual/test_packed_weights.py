"""Weights that the virtual NPU keeps in oneDNN's layout: used when unchanged, dropped when anything writes."""

import pytest
import torch
import torch.nn.functional as F

from npufleet.kernels.virtual import counters

from .hccl_launch import Place, values
from .hccl_torch import world

ROWS, COLUMNS = 512, 256


def packed_uses() -> int:
    return sum(runs for name, runs in counters.read().fast.items() if name.startswith("aten::"))


@pytest.fixture
def used():
    """x, weight and the same on the CPU, the weight used so often that it is packed."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 product in oneDNN")
    x, weight = torch.randn(3, COLUMNS).bfloat16(), torch.randn(ROWS, COLUMNS).bfloat16()
    mine = x.npu(), weight.npu()
    with torch.inference_mode():
        counters.reset()
        for _ in range(300):  # more often where the memory held other weights before
            F.linear(*mine)
            if packed_uses():
                break
        assert packed_uses() == 1
        yield *mine, x, weight


def check(x, weight, cpu_x, cpu_weight, bias=None):
    got = F.linear(x, weight, None if bias is None else bias.npu())
    torch.testing.assert_close(got.cpu(), F.linear(cpu_x, cpu_weight, bias), rtol=2e-2, atol=2e-1)


def test_products_agree(used):
    x, weight, cpu_x, cpu_weight = used
    check(x, weight, cpu_x, cpu_weight)
    check(x, weight, cpu_x, cpu_weight, torch.randn(ROWS).bfloat16())
    check(x.view(1, 3, -1), weight, cpu_x.view(1, 3, -1), cpu_weight)
    assert packed_uses() == 4


WRITES = {
    "in place": lambda weight, new: weight.mul_(0).add_(new),
    "copy": lambda weight, new: weight.copy_(new),
    "copy from the host": lambda weight, new: weight.copy_(new.cpu()),
    "through a view": lambda weight, new: weight[:, :].view(-1).copy_(new.view(-1)),
    "one row at a time": lambda weight, new: [weight[i].copy_(new[i]) for i in range(ROWS)],
    "out argument": lambda weight, new: torch.add(new, 0, out=weight),
    "index": lambda weight, new: weight.index_copy_(0, torch.arange(ROWS, device="npu"), new),
    "foreach": lambda weight, new: torch._foreach_copy_([weight], [new]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_written_weight_is_packed_anew(used, write):
    x, weight, cpu_x, _ = used
    new = torch.randn(ROWS, COLUMNS).bfloat16()
    write(weight, new.npu())
    for _ in range(6):
        check(x, weight, cpu_x, new)


def test_memory_that_changes_hands(used):
    x, weight, cpu_x, _ = used
    address = weight.data_ptr()
    del weight, used
    for _ in range(20):
        new = torch.randn(ROWS, COLUMNS).bfloat16()
        other = new.npu() * 1  # the result of an operation may get the memory of the first weight
        check(x, other, cpu_x, new)
        if other.data_ptr() == address:
            break


def test_a_graph_that_writes_a_weight(used):
    x, weight, cpu_x, _ = used
    source = torch.zeros(ROWS, COLUMNS).bfloat16().npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        weight.copy_(source)
        out = F.linear(x, weight)
    for seed in range(7):
        new = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()
        if seed % 3 != 2:  # some replays see the same weight again
            source.copy_(new)
            last = new
        graph.replay()
        torch.testing.assert_close(out.cpu(), F.linear(cpu_x, last), rtol=2e-2, atol=2e-1)


def _receive(place: Place) -> dict[str, float]:
    """Largest errors of a product after each collective that wrote its weight, which was packed before."""
    import torch.distributed as dist

    def on(rank: int) -> torch.Tensor:
        return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(rank)).bfloat16()

    def fill(weight: torch.Tensor, how: str) -> torch.Tensor:
        """Run one collective; what the weight must then be."""
        if how == "broadcast":
            dist.broadcast(weight, 1)
            return on(1)
        if how == "all-reduce":
            dist.all_reduce(weight)
            return (on(0).float() + on(1).float()).bfloat16()
        if how == "all-gather":
            dist.all_gather_into_tensor(weight, on(place.rank)[: ROWS // 2].npu())
            return torch.cat([on(0)[: ROWS // 2], on(1)[: ROWS // 2]])
        if how == "all-to-all":
            dist.all_to_all_single(weight, on(place.rank).npu())
            half = slice(place.rank * ROWS // 2, (place.rank + 1) * ROWS // 2)
            return torch.cat([on(0)[half], on(1)[half]])
        if place.rank == 0:
            dist.send(on(0).npu(), 1)
            return weight.cpu()
        dist.recv(weight, 0)
        return on(0)

    errors = {}
    x = torch.randn(3, COLUMNS).bfloat16()
    with torch.inference_mode():
        for how in ("broadcast", "all-reduce", "all-gather", "all-to-all", "receive"):
            weight = on(place.rank).npu()
            counters.reset()
            for _ in range(300):
                F.linear(x.npu(), weight)
                if packed_uses():
                    break
            assert packed_uses(), how
            expected = fill(weight, how)
            got = F.linear(x.npu(), weight).cpu()
            errors[how] = float((got - F.linear(x, expected)).abs().max())
    return errors


def test_collectives_write_weights_too(used):
    for errors in values(world(_receive, 2)):
        assert max(errors.values()) < 0.5, errors
