"""Dispatch and combine of experts against their formula; ranks are threads, the references are called as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npufleet.kernels.distribute_limits import MIB, Distribution
from npufleet.kernels.reference import KERNELS
from npufleet.kernels.reference.communicator import Step

from .thread_ranks import Meeting, run_ranks

DISPATCH = KERNELS["npu::npu_moe_distribute_dispatch_v2"]
COMBINE = KERNELS["npu::npu_moe_distribute_combine_v2"]
A2, A3 = "Ascend910B3", "Ascend910_9391"
HIDDEN = {A2: 64, A3: 1024}
TOP_K = 3


def tokens_of(
    rank: int, count: int, experts: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, hidden], different experts [T, k] and weights [T, k] of a rank's tokens."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:TOP_K] for _ in range(count)])
    x = torch.randn(count, hidden, generator=draw)
    return x, ids.int(), torch.rand(count, TOP_K, generator=draw)


def factor(expert: torch.Tensor) -> torch.Tensor:
    """What each expert multiplies its rows with: enough to tell where a row has been."""
    return expert.float() + 1.5


def layer(
    rank: int,
    chip: str,
    experts: int,
    ranks: int,
    counts: list[int],
    dtype: torch.dtype = torch.float32,
    quant_mode: int = 0,
    alg: str | None = None,
    shared: tuple[int, int] = (1, 0),
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Dispatch, multiply every row by its expert's factor, combine: one rank's output and what it received."""
    x, ids, weights = tokens_of(rank, counts[rank], experts, HIDDEN[chip])
    alg = alg if alg is not None else ("fullmesh" if chip == A2 else "")
    group = ("experts", ranks, rank, experts)
    uneven = len(set(counts)) > 1
    common: dict[str, Any] = {
        "comm_alg": alg,
        "global_bs": max(counts) * ranks if uneven else 0,
        "shared_expert_num": shared[0],
        "shared_expert_rank_num": shared[1],
        **{name: value for name, value in others.items() if name != "scales"},
    }
    travels = chip == A2 or alg == "hierarchy"
    sent = DISPATCH(
        x.to(dtype),
        ids,
        *group,
        quant_mode=quant_mode,
        expert_scales=weights if travels else None,
        scales=others.get("scales"),
        **common,
    )
    rows, scales, assist, per_expert, sums, _, expanded = sent
    local = experts // (ranks - shared[1])
    first = (rank - shared[1]) * local
    mine = torch.arange(len(per_expert)) + max(first, 0)
    times = factor(mine) if rank >= shared[1] else torch.full((1,), -2.0)
    used = int(per_expert.sum())
    out = rows.float().clone() if quant_mode == 0 else rows.float() * scales[:, None]
    out[:used] *= times.repeat_interleave(per_expert)[:, None]
    out[used:] = float("nan")
    combined = COMBINE(
        out.to(dtype),
        ids,
        assist,
        sums,
        weights,
        *group,
        expand_scales=expanded if travels else None,
        **common,
    )
    return combined, sent


def expected(rank: int, chip: str, experts: int, count: int, shared: float = 0.0) -> torch.Tensor:
    x, ids, weights = tokens_of(rank, count, experts, HIDDEN[chip])
    return x * ((weights * factor(ids)).sum(1, keepdim=True) + shared)


@pytest.mark.parametrize(
    ("chip", "ranks", "experts", "alg"),
    [
        (A2, 2, 4, "fullmesh"),
        (A2, 4, 24, "fullmesh"),
        (A2, 16, 32, "hierarchy"),
        (A3, 2, 6, ""),
        (A3, 4, 4, "fullmesh_v2"),
        (A3, 16, 16, "hierarchy"),
    ],
)
def test_every_token_meets_its_experts(chip: str, ranks: int, experts: int, alg: str) -> None:
    counts, meeting = [5] * ranks, Meeting(ranks=ranks, chip=chip, buffer_bytes=600 * MIB)
    found = run_ranks(meeting, lambda rank: layer(rank, chip, experts, ranks, counts, alg=alg))
    for rank, (out, sent) in enumerate(found):
        assert torch.allclose(out, expected(rank, chip, experts, 5), atol=1e-4)
        rows, used = sent[0], int(sent[3].sum())
        assert rows[used:].isnan().all() and not rows[:used].isnan().any()
    layout = Distribution(
        generation="A2", algorithm="fullmesh", ranks=ranks, experts=experts, top_k=TOP_K, hidden=64
    )
    assert found[0][1][0].shape[0] == layout.rows(5)
    total = sum(int(sent[3].sum()) for _, sent in found)
    assert total == ranks * 5 * TOP_K
    width = HIDDEN[chip] * 4 + 12 + (4 if chip == A2 or alg == "hierarchy" else 0)
    assert meeting.moved == {
        Step.COUNTS: ranks * (64 * ranks + 8 * experts),
        Step.DISPATCH: total * width,
        Step.COMBINE: total * HIDDEN[chip] * 4,
    }


@pytest.mark.parametrize("counts", [[1, 7], [6, 1, 2, 6]])
def test_ranks_with_different_numbers_of_tokens(counts: list[int]) -> None:
    ranks = len(counts)
    found = run_ranks(Meeting(ranks=ranks), lambda rank: layer(rank, A2, 8, ranks, counts))
    for rank, (out, sent) in enumerate(found):
        assert torch.allclose(out, expected(rank, A2, 8, counts[rank]), atol=1e-4)
        assert sent[0].shape[0] == max(counts) * ranks * min(8 // ranks, TOP_K)


def test_rows_lie_by_expert_then_by_rank_then_by_token() -> None:
    found = run_ranks(Meeting(ranks=2), lambda rank: layer(rank, A2, 4, 2, [4, 4]))
    for rank, (_, sent) in enumerate(found):
        rows, per_expert, sums = sent[0], sent[3], sent[4]
        wanted, counts = [], []
        for expert in (2 * rank, 2 * rank + 1):
            for source in range(2):
                x, ids, _ = tokens_of(source, 4, 4, 64)
                here = x[(ids == expert).any(1)]
                wanted.append(here)
                counts.append(len(here))
        assert torch.equal(rows[: sum(counts)], torch.cat(wanted))
        assert sums[:4].tolist() == torch.tensor(counts).cumsum(0).tolist()
        assert per_expert.tolist() == [counts[0] + counts[1], counts[2] + counts[3]]


@pytest.mark.parametrize("smooth", [False, True])
def test_quantized_rows(smooth: bool) -> None:
    """Rows are int8 by their own largest magnitude; a smoothing factor of 2 is in what comes back."""
    scales = torch.full((6, 1024), 2.0) if smooth else None
    others = {"scales": scales} if smooth else {}

    def work(rank: int) -> Any:
        return layer(rank, A3, 6, 2, [4, 4], torch.bfloat16, quant_mode=2, **others)

    for rank, (out, sent) in enumerate(run_ranks(Meeting(ranks=2, chip=A3), work)):
        assert sent[0].dtype == torch.int8 and sent[1].shape == (sent[0].shape[0],)
        used = int(sent[3].sum())
        assert (sent[0][:used].int().abs().amax(1) == 127).all() and sent[1][used:].isnan().all()
        wanted = expected(rank, A3, 6, 4) * (2 if smooth else 1)
        assert torch.allclose(out.float(), wanted, atol=0.04 * float(wanted.abs().max()))


@pytest.mark.parametrize(("shared", "ranks"), [((1, 1), 3), ((1, 2), 4), ((2, 2), 4)])
def test_ranks_of_shared_experts(shared: tuple[int, int], ranks: int) -> None:
    """Every token goes to one copy of each shared expert too, which multiplies by −2 and has no weight."""
    found = run_ranks(
        Meeting(ranks=ranks, chip=A3), lambda rank: layer(rank, A3, 4, ranks, [3] * ranks, shared=shared)
    )
    for rank, (out, sent) in enumerate(found):
        assert torch.allclose(out, expected(rank, A3, 4, 3, -2.0 * shared[0]), atol=1e-4)
        if rank < shared[1]:
            assert len(sent[3]) == 1 and int(sent[3].sum()) <= sent[0].shape[0]


def test_inactive_tokens_and_choices_take_no_part() -> None:
    tokens = torch.tensor([True, True, False, False])
    found = run_ranks(Meeting(ranks=2), lambda rank: layer(rank, A2, 4, 2, [4, 4], x_active_mask=tokens))
    for rank, (out, _) in enumerate(found):
        assert torch.allclose(out[:2], expected(rank, A2, 4, 4)[:2], atol=1e-4) and out[2:].isnan().all()
    assert sum(int(sent[3].sum()) for _, sent in found) == 2 * 2 * TOP_K
    choices = torch.tensor([[True, False, True]] * 4)
    for rank, (out, _) in enumerate(
        run_ranks(Meeting(ranks=2), lambda rank: layer(rank, A2, 4, 2, [4, 4], x_active_mask=choices))
    ):
        x, ids, weights = tokens_of(rank, 4, 4, 64)
        assert torch.allclose(out, x * (weights * factor(ids) * choices).sum(1, keepdim=True), atol=1e-4)


def test_running_sums_per_expert_where_asked_for() -> None:
    def work(rank: int) -> Any:
        x, ids, weights = tokens_of(rank, 4, 4, 64)
        given = (x, ids, "experts", 2, rank, 4)
        plain = DISPATCH(*given, expert_scales=weights, comm_alg="fullmesh")
        sums = DISPATCH(*given, expert_scales=weights, comm_alg="fullmesh", expert_token_nums_type=0)
        return plain[3], sums[3]

    for counts, sums in run_ranks(Meeting(ranks=2), work):
        assert counts.cumsum(0).tolist() == sums.tolist()
