"""Where shared experts are computed: what is refused, which rank holds what, whose tokens a rank computes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from npufleet.plugin.moe.communication.base import add_own_rows, own_rows
from npufleet.plugin.moe.communication.choice import Chip, Layout, Way, choose
from npufleet.plugin.moe.communication.group import distribution
from npufleet.plugin.moe.own_ranks import SharedRank, shifted
from npufleet.plugin.moe.placement import Placement, SharedPlacement, check_operators, shared_placement
from npufleet.plugin.moe.runner import divides
from npufleet.plugin.moe.shared_linear import NPURowParallelLinear, check_claimed, claim

Checkpoint = Callable[..., Path]


def asked(**options: Any) -> SharedPlacement:
    return shared_placement(SimpleNamespace(additional_config=options))  # type: ignore[arg-type]


def test_what_can_be_asked_for() -> None:
    assert asked() == SharedPlacement(placement=Placement.AUTO, ranks=0, overlap=False)
    assert asked(shared_experts="replicated", shared_experts_overlap=True) == SharedPlacement(
        placement=Placement.WHOLE, overlap=True
    )
    assert asked(shared_expert_ranks=2, moe_communication="mc2").ranks == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_experts": "copied"}, "'copied'; allowed are 'auto', 'tensor-parallel', 'replicated'"),
        ({"shared_expert_ranks": True}, "shared_expert_ranks is True; allowed are whole numbers"),
        ({"shared_expert_ranks": -1}, "shared_expert_ranks is -1"),
        ({"shared_experts_overlap": "yes"}, "shared_experts_overlap is 'yes'; allowed are true and false"),
        ({"shared_expert_ranks": 1, "shared_experts": "replicated"}, "leave shared_experts out"),
        ({"shared_expert_ranks": 1, "shared_experts_overlap": True}, "leave shared_experts_overlap out"),
    ],
)
def test_what_cannot(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(**options)


SPREAD = {"enable_expert_parallel": True, "tensor_parallel_size": 4}
WITH = {"hf_overrides": {"n_shared_experts": 1}}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (SPREAD, {"shared_experts": "replicated"}, "has no shared experts: leave shared_experts"),
        ({**WITH, "tensor_parallel_size": 4}, {"shared_expert_ranks": 2}, "set enable_expert_parallel"),
        (
            {**WITH, **SPREAD, "enable_ep_weight_filter": True},
            {"shared_expert_ranks": 2},
            "enable_ep_weight_filter",
        ),
        ({**WITH, **SPREAD}, {"shared_expert_ranks": 1}, "leaves 3 of 4 ranks for 4 experts"),
        ({**WITH, **SPREAD}, {"shared_expert_ranks": 4}, "leaves 0 of 4 ranks"),
        (
            {**WITH, **SPREAD},
            {"shared_expert_rank": 2},
            "no 'shared_expert_rank'; there is 'shared_expert_ranks'",
        ),
    ],
)
def test_layouts_are_refused_before_anything_starts(
    checkpoint: Checkpoint, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given = {"skip_tokenizer_init": True, "max_model_len": 256, **arguments, "additional_config": options}
    with pytest.raises(ValueError, match=message):
        EngineArgs(model=str(checkpoint("mixture")), **given).create_engine_config()


def test_ranks_alone_need_the_operators_of_a3() -> None:
    def check(chip: str, hidden: int) -> None:
        check_operators(2, chip, distribution(chip, 4, 16, 4, hidden, 2))

    check("Ascend910_9391", 1024)
    with pytest.raises(ValueError, match=r"shared experts on 2 ranks. Use shared_experts: replicated"):
        check("Ascend910B3", 1024)
    with pytest.raises(ValueError, match="on Ascend910_9391: hidden size 128"):
        check("Ascend910_9391", 128)
    with pytest.raises(ValueError, match="not documented"):
        check("Ascend950PR", 1024)
    check_operators(0, "Ascend950PR", None)


def test_steps_too_large_for_mc2_reach_them_by_all_gather() -> None:
    given = {"chip": Chip.A3, "ep_size": 16, "top_k": 4, "capacity": 64, "mc2_tokens": 26}
    assert choose(Layout(**given), 4096) is Way.ALL_TO_ALL
    assert choose(Layout(**given, shared_ranks=4), 4096) is Way.ALL_GATHER
    assert choose(Layout(**given, shared_ranks=4), 26) is Way.MC2


@pytest.mark.parametrize(
    ("rank", "held"), [(0, []), (1, []), (2, [0, 1, 2]), (3, [3, 4, 5])], ids=lambda x: str(x)
)
def test_the_first_ranks_hold_no_routed_experts(rank: int, held: list[int]) -> None:
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        tp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        ep_size=4,
        ep_rank=rank,
        sp_size=1,
        use_ep=True,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=2,
        global_num_experts=6,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    found = shifted(manager, 2)
    assert found.local_num_experts == len(held) and found.get_local_expert_ids() == held
    assert [found.map_global_to_local(i) for i in range(6)] == [
        held.index(i) if i in held else -1 for i in range(6)
    ]
    assert found.moe_parallel_config.ep_rank == rank, "where tokens are sent stays as it is"


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_token_is_one_ranks_own(tokens: int, ranks: int) -> None:
    x = torch.randn(tokens, 5)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        mine = own_rows(x, rank, ranks)
        assert mine.shape == (-(-tokens // ranks), 5)
        add_own_rows(total, mine, rank)
    assert torch.equal(total, x)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_ranks_alone_divide_gathered_tokens(tokens: int) -> None:
    def of(rank: int) -> SharedRank:
        return SharedRank(
            total=4,
            first=0,
            last=0,
            feed_forward=lambda rows, counts: rows,
            compute=lambda x: 2 * x,
            rank=rank,
            ranks=3,
        )

    x = torch.randn(tokens, 4)
    choices = torch.zeros(tokens, 2)
    assert torch.equal(sum(of(rank).apply(x, choices, choices.int()) for rank in range(3)), 2 * x)


def test_shared_experts_outside_of_vllms_layer_are_refused() -> None:
    layer = NPURowParallelLinear.__new__(NPURowParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.moved, layer.claimed = True, False
    model = torch.nn.Sequential(torch.nn.Sequential(layer))
    with pytest.raises(ValueError, match=r"0\.0: Sequential computes its shared experts outside"):
        check_claimed(model)
    claim(model[0])
    check_claimed(model)


@pytest.mark.parametrize(
    ("dtype", "model", "expected"),
    [
        (torch.float16, "deepseek_v2", True),
        (torch.float16, "glm4_moe", False),
        (torch.bfloat16, "deepseek_v3", False),
        (torch.float32, "", False),
    ],
)
def test_float16_is_divided_where_the_model_makes_up_for_it(
    dtype: torch.dtype, model: str, expected: bool
) -> None:
    assert divides(dtype, model) is expected
