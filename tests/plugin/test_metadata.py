"""Host lengths of a batch, plain and padded for a graph."""

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from npufleet.plugin.attention.metadata import host_lengths


def batch(queries: list[int], computed: list[int], padded_requests: int = 0, padded_tokens: int = 0):
    """A batch as vLLM's runner builds it: padding requests have no queries and length 0."""
    requests = len(queries) + padded_requests
    ends = torch.zeros(requests + 1, dtype=torch.int32)
    ends[1 : len(queries) + 1] = torch.tensor(queries).cumsum(0)
    ends[len(queries) + 1 :] = sum(queries)
    lens = torch.zeros(requests, dtype=torch.int32)
    lens[: len(queries)] = torch.tensor(queries) + torch.tensor(computed)
    tokens = sum(queries) + padded_tokens
    return CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=int(lens.max()),
        block_table_tensor=torch.zeros(requests, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("made", "ends", "lens"),
    [
        (batch([5], [0]), [5], [5]),
        (batch([1, 1, 1], [7, 0, 200]), [1, 2, 3], [8, 1, 201]),
        (batch([1, 64, 3], [10, 128, 0]), [1, 65, 68], [11, 192, 3]),
        (batch([1, 1, 1], [7, 8, 9], 1, 1), [1, 2, 3, 4], [8, 9, 10, 1]),
        (batch([1], [7], 3, 3), [1, 2, 3, 4], [8, 1, 1, 1]),
        (batch([3, 3], [7, 8], 2, 6), [3, 6, 9, 12], [10, 11, 3, 3]),
        (batch([2, 5], [0, 0], 0, 9), [2, 7], [2, 5]),  # padded tokens without requests have no queries
    ],
)
def test_host_lengths(made: CommonAttentionMetadata, ends: list[int], lens: list[int]) -> None:
    assert host_lengths(made) == (ends, lens)


def test_the_runners_buffers_are_not_changed() -> None:
    made = batch([1], [7], 3, 3)
    before = made.query_start_loc_cpu.clone(), made.seq_lens_cpu_upper_bound.clone()
    host_lengths(made)
    assert torch.equal(before[0], made.query_start_loc_cpu)
    assert torch.equal(before[1], made.seq_lens_cpu_upper_bound)
