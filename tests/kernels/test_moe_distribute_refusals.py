"""What dispatch and combine refuse, by the name of what is wrong, and the limits that they follow from."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from npufleet.kernels.distribute_limits import MIB, Distribution, generation

from .test_moe_distribute import A2, A3, COMBINE, DISPATCH, layer, tokens_of
from .thread_ranks import Meeting, provided, run_ranks


def layout(**changes: Any) -> Distribution:
    right = {"generation": "A3", "algorithm": "", "ranks": 16, "experts": 256, "top_k": 8, "hidden": 7168}
    return Distribution(**{**right, **changes})


def dispatch(chip: str = A2, ranks: int = 2, buffer: int = 200 * MIB, **changes: Any) -> Any:
    """Rank 0's dispatch, with some arguments changed; nobody answers, so only what is refused before is seen."""
    x, ids, weights = tokens_of(0, 4, 4, 64 if chip == A2 else 1024)
    right: dict[str, Any] = {
        "x": x.bfloat16(),
        "expert_ids": ids,
        "group_ep": "experts",
        "ep_world_size": ranks,
        "ep_rank_id": 0,
        "moe_expert_num": 4,
        "expert_scales": weights if chip == A2 else None,
        "comm_alg": "fullmesh" if chip == A2 else "",
    }
    with provided(Meeting(ranks=ranks, chip=chip, buffer_bytes=buffer)) as here:
        here.rank = 0
        return DISPATCH(**{**right, **changes})


IDS = tokens_of(0, 4, 4, 64)[1]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another chip": ({"chip": "Ascend310P3", "comm_alg": ""}, "no reference for Ascend310P3"),
    "an algorithm left to the environment": ({"comm_alg": ""}, "comm_alg=''"),
    "an unknown algorithm": ({"comm_alg": "ring"}, "comm_alg is 'ring'"),
    "ranks that nodes do not have": ({"ranks": 9, "moe_expert_num": 9}, "9 ranks"),
    "few ranks for a hierarchy": ({"comm_alg": "hierarchy"}, "2 ranks"),
    "another number of ranks": ({"ep_world_size": 4}, "rank 0 of 2"),
    "another rank": ({"ep_rank_id": 1}, "ep_rank_id 1"),
    "experts that do not divide": ({"moe_expert_num": 5}, "5 experts on 2 ranks"),
    "many experts on a rank": ({"moe_expert_num": 50}, "25 experts on a rank"),
    "a hidden size of odd length": ({"x": torch.zeros(4, 40).bfloat16()}, "hidden size 40"),
    "a large hidden size": ({"x": torch.zeros(4, 7200).bfloat16()}, "hidden size 7200"),
    "a small hidden size on A3": ({"chip": A3, "x": torch.zeros(4, 512).bfloat16()}, "hidden size 512"),
    "many choices": (
        {"expert_ids": torch.arange(17).int().expand(4, 17), "moe_expert_num": 20},
        "17 experts per token",
    ),
    "more choices than experts": ({"moe_expert_num": 2}, "3 experts per token"),
    "many tokens": (
        {"x": torch.zeros(257, 64).bfloat16(), "expert_ids": IDS[:1].expand(257, 3)},
        "257 tokens, allowed are 1 to 256",
    ),
    "no token": ({"x": torch.zeros(0, 64).bfloat16(), "expert_ids": IDS[:0]}, "0 tokens"),
    "fewer tokens on all ranks than here": ({"global_bs": 4}, "global_bs 4 is for 2 tokens"),
    "an odd sum of tokens": ({"global_bs": 9}, "must be a multiple of 2"),
    "a small buffer": (
        {"buffer": 3 * MIB},
        "need a buffer of 4198400 bytes, experts has 3145728: raise HCCL_BUFFSIZE",
    ),
    "double precision": ({"x": torch.zeros(4, 64).double()}, "x is torch.float64"),
    "single precision, quantized": ({"x": torch.zeros(4, 64), "quant_mode": 2}, "x is torch.float32"),
    "long experts": ({"expert_ids": IDS.long()}, "expert_ids is torch.int64"),
    "another quantization": ({"quant_mode": 3}, "quant_mode is 3"),
    "static scales": ({"scales": torch.ones(4, 64)}, "without quantization"),
    "scales of other experts": (
        {"scales": torch.ones(5, 64), "quant_mode": 2},
        "scales (5, 64) must be (4, 64)",
    ),
    "weights of other tokens": ({"expert_scales": torch.ones(3, 3)}, "expert_scales (3, 3) must be (4, 3)"),
    "weights on A3": ({"chip": A3, "expert_scales": torch.ones(4, 3)}, "on A2 and with comm_alg 'hierarchy'"),
    "an unknown expert": ({"expert_ids": IDS + 1}, "outside 0 … 3"),
    "an expert twice": ({"expert_ids": IDS[:, :1].expand(4, 3)}, "twice for one token"),
    "a mask with holes": ({"x_active_mask": torch.tensor([True, False, True, True])}, "true behind a false"),
    "a mask of other tokens": ({"x_active_mask": torch.ones(3, dtype=torch.bool)}, "x_active_mask (3,)"),
    "a tensor-parallel exchange": ({"tp_world_size": 2, "group_tp": "tp"}, "tp_world_size=2"),
    "one group for both": ({"group_tp": "experts", "tp_world_size": 1}, "are both 'experts'"),
    "shared experts on A2": ({"shared_expert_rank_num": 1}, "1 shared experts on 1 ranks"),
    "copying experts": ({"copy_expert_num": 1}, "copy_expert_num=1"),
    "a shrinking group": ({"elastic_info": torch.zeros(8, dtype=torch.int32)}, "elastic_info"),
    "an empty name": ({"group_ep": ""}, "1 to 127 characters"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_dispatch(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        dispatch(**changes)


def test_ranks_that_do_not_agree() -> None:
    def two(rank: int, **of_rank_1: Any) -> Any:
        return layer(rank, A2, 4, 2, [4, 4], **({} if rank == 0 else of_rank_1))

    with pytest.raises(ValueError, match=r"quant_mode is \d on rank \d and \d on rank \d"):
        run_ranks(Meeting(ranks=2), lambda rank: two(rank, quant_mode=2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"element size is"):
        run_ranks(Meeting(ranks=2), lambda rank: two(rank, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"global_bs is 0, but ranks have \[4, 3\] tokens"):
        run_ranks(Meeting(ranks=2), lambda rank: layer(rank, A2, 4, 2, [4, 3], global_bs=0))
    with pytest.raises(ValueError, match=r"x_active_mask is given, but ranks have different"):
        run_ranks(
            Meeting(ranks=2),
            lambda rank: layer(rank, A2, 4, 2, [4, 3], x_active_mask=torch.ones(4 - rank, dtype=torch.bool)),
        )


def test_a_combine_of_something_else() -> None:
    def work(change: str, value: Any) -> Any:
        x, ids, weights = tokens_of(0, 4, 4, 64)

        def rank(me: int) -> Any:
            given = ("experts", 2, me, 4)
            rows, _, assist, _, sums, _, expanded = DISPATCH(
                x, ids, *given, expert_scales=weights, comm_alg="fullmesh"
            )
            arguments = {"assist": assist, "sums": sums, "expanded": expanded, "rows": rows}
            arguments[change] = value(arguments[change])
            return COMBINE(
                arguments["rows"], ids, arguments["assist"], arguments["sums"], weights, *given,
                expand_scales=arguments["expanded"], comm_alg="fullmesh",
            )  # fmt: skip

        return run_ranks(Meeting(ranks=2), rank)

    for change, value, message in (
        ("assist", lambda x: x + 1, "are of two dispatches"),
        ("sums", lambda x: -x, "no running sums"),
        ("sums", lambda x: x[1:], "ep_send_counts"),
        ("expanded", lambda x: None, "expand_scales are missing"),
        ("rows", lambda x: x[1:], "expand_x has"),
        ("rows", lambda x: x.to(torch.int8), "expand_x is torch.int8"),
    ):
        with pytest.raises(ValueError, match=message):
            work(change, value)


@pytest.mark.parametrize(
    ("changes", "tokens", "needed"),
    [
        ({}, 64, 2 * (16 * 64 * 16 * 14848 + 9 * 64 * 14336)),
        ({"algorithm": "fullmesh_v2"}, 64, 2 * (16 * 64 * 16 * 30 * 512 + 0) + 2 * 9 * 64 * 14336),
        ({"algorithm": "hierarchy"}, 64, 256 * 64 * (14336 + 128) + 404 * MIB),
        ({"generation": "A2", "algorithm": "hierarchy"}, 64, 260 * 925696 + 8 * MIB),
        (
            {"generation": "A2", "algorithm": "fullmesh", "experts": 64, "top_k": 8},
            32,
            2 * (32 * 16 * 4 * 14336 + 2 * MIB),
        ),
    ],
)
def test_the_buffer_that_tokens_need(changes: dict[str, Any], tokens: int, needed: int) -> None:
    """By hand from the documentation's formulas; 7168 · 2 + 64 bytes take 30 pieces of 480."""
    made = layout(**changes)
    assert made.buffer_bytes(tokens) == needed
    assert made.most_tokens(needed) == tokens and made.most_tokens(needed - 1) == tokens - 1


def test_what_layers_are_taken() -> None:
    assert not layout().refusals() and layout().rows(4) == 4 * 16 * 8
    assert layout(ranks=1).refusals() == ["1 ranks"]
    assert layout(ranks=768, experts=768, hidden=8192).refusals() == []
    assert layout(ranks=512, experts=1024).refusals() == []
    assert layout(hidden=1000).refusals() == ["hidden size 1000"]
    assert layout(algorithm="fullmesh_v2", top_k=13).refusals() == ["13 experts per token"]
    assert layout(generation="A2", algorithm="hierarchy", ranks=32).refusals() == []
    assert layout(generation="A2", algorithm="fullmesh", ranks=8).refusals() == [
        "32 experts on a rank (at most 24)"
    ]
    assert layout(shared=2, shared_ranks=3, experts=13 * 16).refusals() == ["2 shared experts on 3 ranks"]
    limits = [layout(generation=g, algorithm=a).token_limit() for g, a in (
        ("A2", "fullmesh"), ("A2", "hierarchy"), ("A3", ""), ("A3", "fullmesh_v2"), ("A3", "hierarchy"),
    )]  # fmt: skip
    assert limits == [256, 512, 512, 256, 256]
    names = {"Ascend910B3": "A2", "Ascend910_9391": "A3", "Ascend950PR": None}
    assert {name: generation(name) for name in names} == names
