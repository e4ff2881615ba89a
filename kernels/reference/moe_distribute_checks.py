"""What dispatch and combine of experts are given, checked against what the device documents for its chip.

float32 rows, which the device does not take, are accepted as the attention references do: they prove that a model's
tokens equal those of another implementation.
"""

from typing import Any, NamedTuple

import torch

from ..distribute_limits import ALGORITHMS, HIERARCHY, Distribution, generation
from .checks import FLOATS, refuse_arguments, require, require_dtype, wrong
from .communicator import Communicator, communicator

DEFAULTS: dict[str, Any] = {
    "elastic_info": None,
    "performance_info": None,
    "shared_expert_x": None,
    "ori_x": None,
    "const_expert_alpha_1": None,
    "const_expert_alpha_2": None,
    "const_expert_v": None,
    "tp_rank_id": 0,
    "expert_shard_type": 0,
    "zero_expert_num": 0,
    "copy_expert_num": 0,
    "const_expert_num": 0,
    "comm_quant_mode": 0,
    "y_dtype": None,
    "x_dtype": None,
    "scales_dtype": None,
}
"""Arguments that have no reference but for this value."""


class Call(NamedTuple):
    """One rank's call, without its data."""

    op: str
    group: Communicator
    layout: Distribution
    tokens: int
    most_tokens: int
    """Of any rank."""
    global_bs: int
    """As given."""
    tp_ranks: int

    @property
    def local_experts(self) -> int:
        """Of this rank; a rank of shared experts has one."""
        return self.experts_of(self.group.rank)

    def experts_of(self, rank: int) -> int:
        """As ``local_experts``, for any rank."""
        return 1 if rank < self.layout.shared_ranks else self.layout.local_experts

    @property
    def reserved(self) -> int:
        """Numbers behind the running sums, which the device keeps for itself where weights travel with the rows."""
        layout = self.layout
        return self.most_tokens * layout.ranks * 2 * layout.top_k * (layout.ranks // 8)

    @property
    def rows(self) -> int:
        """Rows that this rank has room for."""
        layout = self.layout
        if self.group.rank < layout.shared_ranks:
            return self.most_tokens * -(-layout.ranks // (layout.shared_ranks // layout.shared))
        return layout.rows(self.most_tokens)


def _check_group(op: str, name: str, ranks: int, rank: int, others: dict[str, Any]) -> Communicator:
    require(1 <= len(name) < 128, op, f"group_ep is {name!r}, it must have 1 to 127 characters")
    tp_ranks, tp_group = int(others.get("tp_world_size", 0)), str(others.pop("group_tp", ""))
    if tp_ranks not in (0, 1):
        raise NotImplementedError(f"{op}: no reference for tp_world_size={tp_ranks} (only 0 and 1)")
    require(not tp_group or tp_group != name, op, f"group_tp and group_ep are both {name!r}")
    group = communicator(op, name)
    require(
        (ranks, rank) == (group.ranks, group.rank),
        op,
        f"ep_world_size {ranks} and ep_rank_id {rank}, but this is rank {group.rank} of {group.ranks} in {name}",
    )
    return group


def _layout(
    op: str,
    group: Communicator,
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: int,
    others: dict[str, Any],
) -> Distribution:
    chip = generation(group.chip)
    if chip is None:
        raise NotImplementedError(f"{op}: no reference for {group.chip} (only A2 and A3)")
    algorithm = str(others.pop("comm_alg", ""))
    if chip == "A2" and not algorithm:
        raise NotImplementedError(
            f"{op}: no reference for comm_alg='' on A2, which depends on the environment"
        )
    require(algorithm in ALGORITHMS[chip], op, f"comm_alg is {algorithm!r}, allowed are {ALGORITHMS[chip]}")
    layout = Distribution(
        generation=chip,
        algorithm=algorithm,
        ranks=group.ranks,
        experts=experts,
        top_k=expert_ids.shape[1],
        hidden=rows.shape[1],
        itemsize=2,
        shared=int(others.pop("shared_expert_num", 1)),
        shared_ranks=int(others.pop("shared_expert_rank_num", 0)),
    )
    refused = layout.refusals()
    require(not refused, op, f"{chip} with comm_alg {algorithm!r} does not take {'; '.join(refused)}")
    return layout


def check_call(
    op: str,
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    group: tuple[str, int, int],
    experts: int,
    others: dict[str, Any],
) -> Call:
    """The call; takes what it checks out of ``others`` and refuses what is left and has no reference.

    :param rows: with the hidden size: x or expand_x.
    :param group: name, ranks, rank.
    """
    require_dtype(op, "expert_ids", expert_ids, (torch.int32,))
    for name, tensor in (("x", rows), ("expert_ids", expert_ids)):
        require(tensor.dim() == 2, op, f"{name} has {tensor.dim()} dimensions, it must have 2")
    found = _check_group(op, *group, others)
    layout = _layout(op, found, rows, expert_ids, experts, others)
    tokens, limit = expert_ids.shape[0], layout.token_limit()
    require(0 < tokens <= limit, op, f"{tokens} tokens, allowed are 1 to {limit}")
    global_bs = int(others.pop("global_bs", 0))
    require(
        global_bs % layout.ranks == 0,
        op,
        f"global_bs is {global_bs}, it must be a multiple of {layout.ranks}",
    )
    most = global_bs // layout.ranks or tokens
    require(
        tokens <= most <= limit, op, f"global_bs {global_bs} is for {most} tokens of a rank, given {tokens}"
    )
    needs = layout.buffer_bytes(most)
    require(
        needs <= found.buffer_bytes,
        op,
        f"{most} tokens of a rank need a buffer of {needs} bytes, {group[0]} has {found.buffer_bytes}: "
        "raise HCCL_BUFFSIZE",
    )
    refuse_arguments(op, others, DEFAULTS)
    return Call(op, found, layout, tokens, most, global_bs, int(others.get("tp_world_size", 0)))


def check_dispatch(call: Call, x: torch.Tensor, others: dict[str, Any]) -> None:
    """The tensors of a dispatch, and what depends on its quantization."""
    op, layout, mode = call.op, call.layout, others["quant_mode"]
    require_dtype(op, "x", x, FLOATS if mode == 0 else FLOATS[1:])
    require(x.shape[0] == call.tokens, op, f"{x.shape[0]} tokens but experts for {call.tokens}")
    require(mode in (0, 2), op, f"quant_mode is {mode}, allowed are 0 (none) and 2 (int8, by row)")
    require(others["expert_token_nums_type"] in (0, 1), op, "expert_token_nums_type must be 0 or 1")
    scales = others["scales"]
    if scales is not None:
        require(mode == 2, op, "scales are given without quantization")
        require(layout.algorithm != HIERARCHY, op, "scales are not taken with comm_alg 'hierarchy'")
        require_dtype(op, "scales", scales, (torch.float32,))
        shape = (layout.experts + (layout.shared if layout.shared_ranks else 0), layout.hidden)
        require(tuple(scales.shape) == shape, op, f"scales {tuple(scales.shape)} must be {shape}")
    weights = others["expert_scales"]
    if weights is not None:
        require(
            layout.weights_travel, op, "expert_scales are taken on A2 and with comm_alg 'hierarchy' alone"
        )
        _check_weights(op, weights, call)


def _check_weights(op: str, weights: torch.Tensor, call: Call) -> None:
    require_dtype(op, "expert_scales", weights, (torch.float32,))
    shape = (call.tokens, call.layout.top_k)
    require(tuple(weights.shape) == shape, op, f"expert_scales {tuple(weights.shape)} must be {shape}")


def check_combine(
    call: Call,
    rows: torch.Tensor,
    assist: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor,
    expanded: Any,
) -> None:
    """The tensors of a combine."""
    op, layout = call.op, call.layout
    require_dtype(op, "expand_x", rows, FLOATS)
    require(rows.shape[0] == call.rows, op, f"expand_x has {rows.shape[0]} rows, it must have {call.rows}")
    for name, tensor in (("assist_info_for_combine", assist), ("ep_send_counts", counts)):
        require_dtype(op, name, tensor, (torch.int32,))
    room = max(call.tokens * layout.top_k, call.rows * 128)
    require(
        tuple(assist.shape) == (room,), op, f"assist_info_for_combine {tuple(assist.shape)} must be [{room}]"
    )
    least = layout.ranks * call.local_experts
    if layout.weights_travel:
        require(
            expanded is not None, op, "expand_scales are missing, which dispatch returns for expert_scales"
        )
        least += call.reserved
    require(tuple(counts.shape) == (least,), op, f"ep_send_counts {tuple(counts.shape)} must be [{least}]")
    _check_weights(op, weights, call)


def active_choices(call: Call, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """bool [tokens, k]: the choices that take part. Looks at the data."""
    op, layout = call.op, call.layout
    if mask is None:
        active = torch.ones_like(expert_ids, dtype=torch.bool)
    else:
        require_dtype(op, "x_active_mask", mask, (torch.bool,))
        shapes = (
            [(call.tokens,)] if layout.algorithm == HIERARCHY else [(call.tokens,), tuple(expert_ids.shape)]
        )
        if layout.algorithm == HIERARCHY and layout.generation == "A2":
            raise wrong(op, "x_active_mask is not taken with comm_alg 'hierarchy' on A2")
        require(tuple(mask.shape) in shapes, op, f"x_active_mask {tuple(mask.shape)} must be one of {shapes}")
        if mask.dim() == 1:
            require(bool((mask[1:] <= mask[:-1]).all()), op, "x_active_mask has a true behind a false")
        active = mask.view(call.tokens, -1).expand_as(expert_ids)
    if not 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < layout.experts:
        raise wrong(op, f"expert_ids names an expert outside 0 … {layout.experts - 1}")
    ordered = expert_ids.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise wrong(op, "expert_ids names an expert twice for one token")
    return active
