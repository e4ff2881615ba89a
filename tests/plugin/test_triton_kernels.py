"""Replacements of Triton kernels against a plain loop over the kernel's own definition."""

import inspect
import itertools

import pytest
import torch
from vllm.triton_utils.dispatcher import _kernel_arg_names, _resolve_kernel

from npufleet.plugin.triton_kernels import REPLACEMENTS, compute_slot_mapping

PAD = -1


def loop(
    starts: list[int], positions: torch.Tensor, table: torch.Tensor, block: int, size: int
) -> torch.Tensor:
    out = torch.full((size,), PAD, dtype=torch.int64)
    for request, (a, b) in enumerate(itertools.pairwise(starts)):
        for token in range(a, b):
            number, offset = divmod(int(positions[token]), block)
            out[token] = int(table[request, number]) * block + offset
    return out


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [3, 0, 5], [0, 0, 2], [130, 1, 7]])
def test_slot_mapping(lengths: list[int]) -> None:
    torch.manual_seed(0)
    block, size = 16, 160
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = starts[-1]
    positions = torch.cat([torch.arange(n) + 5 * i for i, n in enumerate(lengths)])
    table = torch.randint(1, 99, (len(lengths) + 2, 12), dtype=torch.int32)
    out = torch.zeros(size, dtype=torch.int64)
    compute_slot_mapping(
        tokens, size, torch.tensor(starts, dtype=torch.int32), positions, table, table.stride(0), out, block,
        1, 0, 1, PAD, 1024,
    )  # fmt: skip
    assert torch.equal(out, loop(starts, positions, table, block, size))


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_arguments_are_those_of_the_kernel(name: str) -> None:
    host, attribute = _resolve_kernel(name)
    from vllm.triton_utils import dispatcher

    kernel = dispatcher._registry.get(name, (getattr(host, attribute), None))[0]
    theirs = [x.lower().removesuffix("_ptr") for x in _kernel_arg_names(kernel)]
    ours = list(inspect.signature(REPLACEMENTS[name]).parameters)
    assert ours == theirs
