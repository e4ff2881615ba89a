"""Experts: which layouts are refused, how routers translate, and which way of communication a step takes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter, grouped_topk

from npufleet.plugin.moe.communication.all_gather import drop_padding, pad_rows, restore_padding
from npufleet.plugin.moe.communication.by_size import mc2_tokens, why_not_mc2
from npufleet.plugin.moe.communication.choice import Chip, Layout, Way, chip_of, choose, worth_sending
from npufleet.plugin.moe.communication.group import distribution, hccl_buffer_bytes, wanted
from npufleet.plugin.moe.communication.preference import preferred_way
from npufleet.plugin.moe.router import NPURouter, npu_router

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("llama", {"enable_expert_parallel": True}, r"Number of experts .* greater than 0"),
        (
            "mixture",
            {"enable_expert_parallel": True, "tensor_parallel_size": 8},
            r"4 experts cannot be spread evenly over 8 ranks.*divides 4",
        ),
        (
            "mixture",
            {"tensor_parallel_size": 8, "hf_overrides": {"moe_intermediate_size": 36}},
            r"36 intermediate elements cannot be split over 8 ranks.*enable_expert_parallel",
        ),
        (
            "mixture",
            {
                "enable_expert_parallel": True,
                "tensor_parallel_size": 2,
                "expert_placement_strategy": "round_robin",
            },
            r"'round_robin'.*'linear'",
        ),
        (
            "mixture",
            {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"},
            r"'deepep_low_latency' is not for NPU: leave it out",
        ),
        (
            "mixture",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "enable_eplb": True},
            r"load balancing is only supported on",
        ),
    ],
)
def test_layouts_that_cannot_work_are_refused(
    checkpoint: Checkpoint, kind: str, arguments: dict[str, Any], message: str
) -> None:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 256, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=message):
        EngineArgs(model=str(checkpoint(kind)), **(defaults | arguments)).create_engine_config()


def test_a_layout_that_divides_is_taken(checkpoint: Checkpoint) -> None:
    config = EngineArgs(
        model=str(checkpoint("mixture")),
        skip_tokenizer_init=True,
        max_model_len=256,
        dtype="bfloat16",
        tensor_parallel_size=4,
        enable_expert_parallel=True,
    ).create_engine_config()
    assert config.parallel_config.enable_expert_parallel


# Routers against vLLM's own formula in PyTorch

EXPERTS, TOKENS = 24, 9


def logits() -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))


def select(router: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = logits().to("npu")
    weights, experts = npu_router(router).select_experts(hidden_states=given, router_logits=given)
    order = experts.argsort(-1)  # vLLM's formula leaves the order open
    return weights.gather(-1, order).cpu(), experts.gather(-1, order).cpu()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_grouped_routing_is_vllms(score: str, renormalize: bool, biased: bool) -> None:
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) * 0.3 if biased else None
    settings: dict[str, Any] = {"renormalize": renormalize, "num_expert_group": 4, "topk_group": 2}
    router = GroupedTopKRouter(
        5,
        EXPERTS,
        scoring_func=score,
        routed_scaling_factor=2.5,
        e_score_correction_bias=None if bias is None else bias.to("npu"),
        **settings,
    )
    expected, chosen = grouped_topk(logits(), logits(), 5, renormalize, 4, 2, score, 2.5, bias)
    order = chosen.argsort(-1)
    weights, experts = select(router)
    assert torch.equal(experts, chosen.gather(-1, order))
    assert torch.allclose(weights, expected.gather(-1, order), atol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_plain_routing(renormalize: bool) -> None:
    weights, experts = select(FusedTopKRouter(3, EXPERTS, renormalize=renormalize))
    expected, chosen = logits().softmax(-1).topk(3)
    expected = expected / expected.sum(-1, keepdim=True) if renormalize else expected
    order = chosen.argsort(-1)
    assert torch.equal(experts.long(), chosen.gather(-1, order))
    assert torch.allclose(weights, expected.gather(-1, order), atol=1e-6)


def test_routing_with_a_bias_and_a_scale() -> None:
    bias = torch.linspace(-0.5, 0.5, EXPERTS)
    router = FusedTopKBiasRouter(
        3, EXPERTS, e_score_correction_bias=bias.to("npu"), routed_scaling_factor=1.8, scoring_func="sigmoid"
    )
    weights, experts = select(router)
    scores = logits().sigmoid()
    chosen = (scores + bias).topk(3).indices.sort(-1).values
    expected = scores.gather(-1, chosen)
    assert torch.equal(experts.long(), chosen)
    assert torch.allclose(weights, expected / expected.sum(-1, keepdim=True) * 1.8, atol=1e-6)


def test_groups_that_do_not_divide_the_experts_are_no_groups() -> None:
    router = npu_router(
        GroupedTopKRouter(3, EXPERTS, num_expert_group=7, topk_group=2, scoring_func="sigmoid")
    )
    assert isinstance(router, NPURouter) and (router.rule.groups, router.rule.top_groups) == (1, 1)


def test_our_own_router_and_one_in_pytorch_stay() -> None:
    custom = CustomRoutingRouter(2, EXPERTS, custom_routing_function=lambda *_: None)
    assert npu_router(custom) is custom
    ours = npu_router(FusedTopKRouter(3, EXPERTS))
    assert npu_router(ours) is ours
    assert ours.routing_method_type == RoutingMethodType.RenormalizeNaive


def test_what_no_operator_computes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FusedTopKBiasRouter \(sqrtsoftplus\).*softmax or sigmoid"):
        npu_router(FusedTopKBiasRouter(2, EXPERTS, scoring_func="sqrtsoftplus"))
    with pytest.raises(ValueError, match=r"FusedTopKBiasRouter"):
        npu_router(FusedTopKBiasRouter(2, EXPERTS, hash_indices_table=torch.zeros(4, 2)))
    with pytest.raises(ValueError, match=r"24 experts in 12 groups.*at least 3"):
        npu_router(GroupedTopKRouter(2, EXPERTS, num_expert_group=12, topk_group=4))


# The choice of the way


def layout(**changes: Any) -> Layout:
    return Layout(**{"chip": Chip.A3, "ep_size": 16, "top_k": 8, "capacity": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "tokens", "way"),
    [
        ({}, 64, Way.ALL_GATHER),
        ({}, 65, Way.ALL_TO_ALL),
        ({"chip": Chip.A5}, 65, Way.ALL_TO_ALL),
        ({"chip": Chip.A2}, 4096, Way.ALL_GATHER),
        ({"ep_size": 1}, 4096, Way.ALL_GATHER),
        ({"ep_size": 8}, 4096, Way.ALL_GATHER),
        ({"ep_size": 8, "top_k": 7}, 4096, Way.ALL_TO_ALL),
    ],
)
def test_the_way_of_a_step(changes: dict[str, Any], tokens: int, way: Way) -> None:
    assert choose(layout(**changes), tokens) is way


@pytest.mark.parametrize(
    ("changes", "tokens", "way"),
    [
        ({}, 64, Way.MC2),  # 4 tokens of each of 16 ranks
        ({}, 65, Way.ALL_TO_ALL),
        ({"mc2_tokens": 8}, 100, Way.MC2),
        ({"sharing": 1}, 5, Way.ALL_GATHER),
        ({"chip": Chip.A2}, 64, Way.MC2),
        ({"chip": Chip.A2}, 65, Way.ALL_GATHER),
        ({"ep_size": 1}, 1, Way.ALL_GATHER),
        ({"preferred": Way.ALL_GATHER}, 4096, Way.ALL_GATHER),
        ({"preferred": Way.MC2, "ep_size": 2}, 64, Way.MC2),
        ({"preferred": Way.MC2, "ep_size": 2}, 65, Way.ALL_GATHER),
        ({"preferred": Way.ALL_TO_ALL}, 64, Way.ALL_GATHER),
        ({"preferred": Way.ALL_TO_ALL, "ep_size": 2, "chip": Chip.A2}, 65, Way.ALL_TO_ALL),
    ],
)
def test_where_mc2_has_room(changes: dict[str, Any], tokens: int, way: Way) -> None:
    assert choose(layout(**{"mc2_tokens": 4, "sharing": 16, **changes}), tokens) is way


@pytest.mark.parametrize(
    ("chip", "ranks", "top_k", "gathers", "worth"),
    [
        ("A3", 16, 8, False, True),
        ("A3", 8, 8, False, False),
        ("A3", 16, 8, True, True),
        ("A3", 15, 8, True, False),
        ("A2", 8, 2, False, False),
        ("A2", 16, 8, False, True),
    ],
)
def test_when_sent_rows_are_fewer(chip: str, ranks: int, top_k: int, gathers: bool, worth: bool) -> None:
    assert worth_sending(chip, ranks, top_k, gathers=gathers) is worth


def test_the_memory_of_the_largest_step_bounds_mc2() -> None:
    """DeepSeek V3 on 32 dies: 8 experts on each, so a rank may receive every row of all tokens."""
    layer = distribution("Ascend910_9391", 32, 256, 8, 7168)
    assert layer is not None and layer.algorithm == "fullmesh_v1"
    assert layer.most_tokens(200 << 20) == 26
    assert mc2_tokens(layer, 200 << 20, 1024 * 8) == 26
    assert mc2_tokens(layer, 200 << 20, 256 * 8) == 8
    names = {16: "hierarchy", 64: "hierarchy", 8: "fullmesh", 128: "fullmesh"}
    for ranks, algorithm in names.items():
        made = distribution("Ascend910B3", ranks, 256, 8, 7168)
        assert made is not None and made.algorithm == algorithm
    assert distribution("Ascend950PR", 16, 256, 8, 7168) is None


def test_a_way_by_name() -> None:
    def asked(given: dict[str, Any]) -> Way | None:
        return preferred_way(SimpleNamespace(additional_config=given))  # type: ignore[arg-type]

    assert asked({}) is None and asked({"moe_communication": "auto"}) is None
    assert asked({"moe_communication": "mc2"}) is Way.MC2
    assert asked({"npus": [0, 1]}) is None, "what the launcher plans is not for us"
    with pytest.raises(ValueError, match=r"no 'moe_comunication'; there is 'moe_communication'"):
        asked({"moe_comunication": "mc2"})
    with pytest.raises(ValueError, match=r"'ring'; allowed are 'auto', 'all-gather', 'all-to-all', 'mc2'"):
        asked({"moe_communication": "ring"})


def engine_config(tensor: int = 1, data: int = 16, **changes: Any) -> Any:
    """What the choice of a communicator reads of an engine's configuration: DeepSeek V3 by default."""
    given = {
        "experts": 256,
        "top_k": 8,
        "hidden": 7168,
        "dtype": torch.bfloat16,
        "way": "auto",
        "spread": True,
    }
    given |= changes
    model = SimpleNamespace(
        is_moe=given["experts"] > 0,
        dtype=given["dtype"],
        hf_text_config=SimpleNamespace(num_experts_per_tok=given["top_k"]),
        get_num_experts=lambda: given["experts"],
        get_hidden_size=lambda: given["hidden"],
    )
    parallel = SimpleNamespace(
        enable_expert_parallel=given["spread"],
        tensor_parallel_size=tensor,
        data_parallel_size=data,
        use_sequence_parallel_moe=given["spread"] and tensor > 1 and data > 1,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        additional_config={"moe_communication": given["way"]},
    )


@pytest.mark.parametrize(
    ("changes", "chip", "opened"),
    [
        ({}, "A2", True),
        ({}, "A3", True),
        ({"data": 8}, "A2", False),  # inside a node
        ({"data": 8, "top_k": 4, "experts": 64}, "A3", True),
        (
            {"tensor": 8, "data": 1},
            "A3",
            False,
        ),  # shared tokens, gathered behind: more than an all-reduce moves
        ({"tensor": 4, "data": 4}, "A3", True),
        ({"experts": 0}, "A3", False),
        ({"spread": False}, "A3", False),
        ({"data": 1}, "A3", False),
        ({"hidden": 512}, "A3", False),
        ({"dtype": torch.float32}, "A3", False),
        ({"dtype": torch.float32, "way": "mc2"}, "A3", True),
        ({"data": 2, "experts": 16, "way": "mc2", "hidden": 128}, "A2", True),
        ({"way": "all-gather"}, "A3", False),
        ({"way": "all-to-all"}, "A3", False),
    ],
)
def test_which_engines_open_a_communicator_for_mc2(changes: dict[str, Any], chip: str, opened: bool) -> None:
    name = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}[chip]
    assert wanted(engine_config(**changes), name) is opened
    assert not wanted(engine_config(**changes), "Ascend950PR")


def test_the_buffer_of_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert hccl_buffer_bytes() == 200 << 20
    monkeypatch.setenv("HCCL_BUFFSIZE", "1024")
    assert hccl_buffer_bytes() == 1 << 30
    for wrong in ("0", "1.5", "many"):
        monkeypatch.setenv("HCCL_BUFFSIZE", wrong)
        with pytest.raises(ValueError, match=f"HCCL_BUFFSIZE is '{wrong}'"):
            hccl_buffer_bytes()


@pytest.mark.parametrize(
    ("ranks", "experts", "hidden", "message"),
    [
        (2, 50, 64, "25 experts on a rank"),
        (2, 4, 40, "hidden size 40"),
        (2, 4, 64, "HCCL_BUFFSIZE of 5 at least, and max_num_batched_tokens of 2"),
    ],
)
def test_why_mc2_is_not_possible(ranks: int, experts: int, hidden: int, message: str) -> None:
    layer = distribution("Ascend910B3", ranks, experts, 2, hidden)
    assert message in why_not_mc2(layout(chip=Chip.A2, ep_size=ranks, top_k=2), layer)


def test_chips_by_name() -> None:
    names = {"Ascend910B3": Chip.A2, "Ascend910_9392": Chip.A3, "Ascend950PR": Chip.A5}
    assert {name: chip_of(name) for name in names} == names
    with pytest.raises(ValueError, match=r"Ascend310P3.*Ascend910B"):
        chip_of("Ascend310P3")


@pytest.mark.parametrize("sizes", [[3, 3], [1, 4, 2], [5, 1]])
def test_padding_is_dropped_and_restored(sizes: list[int]) -> None:
    largest = max(sizes)
    parts = [torch.full((size, 2), float(i + 1)) for i, size in enumerate(sizes)]
    padded = torch.cat([pad_rows(part, largest) for part in parts])
    dense = drop_padding(padded, sizes)
    assert torch.equal(dense, torch.cat(parts))
    assert torch.equal(restore_padding(dense, sizes), padded)
