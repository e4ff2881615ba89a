"""Ways of communication between two ranks, each against the layer by its definition."""

import multiprocessing
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

RANKS, HIDDEN, MIDDLE, EXPERTS, TOP_K = 2, 32, 16, 6, 2
DEADLINE = 300.0


def make(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, hidden], weights [T, k] and experts [T, k] of their choices."""
    draw = torch.Generator().manual_seed(seed)
    weights, experts = torch.randn(tokens, EXPERTS, generator=draw).softmax(-1).topk(TOP_K)
    return torch.randn(tokens, HIDDEN, generator=draw), weights, experts.int()


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(99)
    gate_up = torch.randn(EXPERTS, HIDDEN, 2 * MIDDLE, generator=draw) / HIDDEN**0.5
    return gate_up, torch.randn(EXPERTS, MIDDLE, HIDDEN, generator=draw) / MIDDLE**0.5


def layer(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Every token through its experts, one by one."""
    gate_up, down = parameters()
    out = torch.zeros_like(x)
    for token, (token_weights, token_experts) in enumerate(zip(weights, experts.tolist(), strict=True)):
        for weight, expert in zip(token_weights, token_experts, strict=True):
            gate, up = (x[token] @ gate_up[expert]).chunk(2)
            out[token] += weight * ((F.silu(gate) * up) @ down[expert])
    return out


def join(rank: int, port: int) -> None:
    """Make the process a rank of one tensor-parallel and expert-parallel group."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.npu.set_device(rank)
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=RANKS))
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, backend="hccl")
        initialize_model_parallel(tensor_model_parallel_size=RANKS)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.cpu() - expected).abs().max())


def run_rank(rank: int, port: int, results: Any) -> None:
    """One rank's part: the largest error of each case."""
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.forward_context import DPMetadata

    from npufleet.kernels.ops import moe as ops
    from npufleet.kernels.ops import moe_distribute as distribute
    from npufleet.plugin.moe.communication import group
    from npufleet.plugin.moe.communication.all_gather import AllGather
    from npufleet.plugin.moe.communication.all_to_all import AllToAll
    from npufleet.plugin.moe.communication.base import own_rows
    from npufleet.plugin.moe.communication.mc2 import MC2
    from npufleet.plugin.moe.experts import LocalExperts

    join(rank, port)
    process_group = torch.distributed.new_group([0, 1], backend="hccl")
    spread = group.distribution("Ascend910B3", RANKS, EXPERTS, TOP_K, HIDDEN)
    assert spread is not None
    experts_group = distribute.ExpertGroup(
        name=distribute.communicator_name(process_group), rank=rank, layout=spread
    )
    share = EXPERTS // RANKS
    gate_up, down = (part[rank * share : (rank + 1) * share].contiguous().npu() for part in parameters())
    local = LocalExperts(
        total=EXPERTS,
        first=rank * share,
        last=(rank + 1) * share,
        feed_forward=lambda rows, counts: ops.feed_forward(rows, gate_up, down, counts),
    )

    def config(spread: bool) -> Any:
        """Of a layer whose tokens are spread over the ranks, or shared by them."""
        parallel = SimpleNamespace(ep_size=RANKS)
        return SimpleNamespace(
            is_sequence_parallel=spread, sp_size=RANKS if spread else 1, moe_parallel_config=parallel
        )

    errors: dict[str, float] = {}
    for tokens in (1, 7, 8):  # shared tokens: the same on both ranks
        case = make(tokens, seed=tokens)
        given = [part.npu() for part in case]
        out, whole = AllGather(config(False)).run(*given, local, None)
        assert not whole
        errors[f"all-gather {tokens}"] = error(tensor_model_parallel_all_reduce(out), layer(*case))
        for name, way in (
            ("all-to-all", AllToAll(config(False))),
            ("mc2", MC2(config(False), experts_group)),
        ):
            out, whole = way.run(*given, local, None)
            assert whole
            errors[f"{name} {tokens}"] = error(out, layer(*case))

        def shared(x: torch.Tensor = given[0]) -> torch.Tensor:
            """Shared experts that double the tokens, of this rank's part."""
            return own_rows(2 * x, rank, RANKS)

        for way in (AllGather(config(False)), AllToAll(config(False)), MC2(config(False), experts_group)):
            out, whole = way.run(*given, local, None, shared)
            out = out if whole else tensor_model_parallel_all_reduce(out)
            errors[f"{type(way).__name__} and shared {tokens}"] = error(out, layer(*case) + 2 * case[0])
    case = make(5, seed=50 + rank)  # a rank's own tokens, all for the experts of rank 1
    case = (
        case[0],
        case[1],
        torch.stack([share + (torch.arange(5) + i) % share for i in range(TOP_K)], 1).int(),
    )
    given = [part.npu() for part in case]
    step = DPMetadata(torch.tensor([5 * RANKS]))
    for way in (
        AllGather(config(True)),
        AllToAll(config(True)),
        MC2(config(True), experts_group),
    ):
        out, whole = way.run(*given, local, step)
        assert whole
        errors[f"spread {type(way).__name__}"] = error(out, layer(*case))
        out, whole = way.run(*given, local, step, lambda: 2 * given[0])
        assert whole
        errors[f"spread {type(way).__name__} and shared"] = error(out, layer(*case) + 2 * case[0])
    results.put((rank, errors))


@pytest.mark.slow
def test_two_ranks_agree_with_the_definition() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, port, results), daemon=True) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=DEADLINE) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for errors in found.values():
        assert len(errors) == 24
        assert max(errors.values()) < 1e-5, errors
