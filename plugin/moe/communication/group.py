"""The communicator of MC2: one for all layers of a model, which no collective may use."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed import get_ep_group
from vllm.platforms import current_platform

from npufleet.kernels.distribute_limits import FULL_MESH, HIERARCHY, MIB, Distribution, generation
from npufleet.kernels.ops.moe_distribute import communicator_name

from ..placement import shared_placement
from .choice import Way, worth_sending
from .preference import preferred_way

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HALVES = (torch.bfloat16, torch.float16)
DEFAULT_BUFFER = 200  # MB, what HCCL takes without HCCL_BUFFSIZE
HIERARCHICAL_RANKS = (16, 32, 64)
"""Ranks of two, four and eight nodes of A2, over which rows go between nodes once and then inside."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The communicator as this rank has it."""

    name: str
    rank: int
    ranks: int
    buffer_bytes: int
    process_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Kept alive as long as the name is used."""


_opened: list[Opened] = []


def opened() -> Opened | None:
    """The communicator, if this rank has one."""
    return _opened[0] if _opened else None


def forget() -> None:
    """The groups of this process are gone, or about to go."""
    _opened.clear()


def remember(group: Opened) -> None:
    """Use ``group`` from now on."""
    forget()
    _opened.append(group)


def hccl_buffer_bytes() -> int:
    """HCCL_BUFFSIZE, in bytes.

    :raises ValueError: it is not a whole number of MB.
    """
    text = os.environ.get("HCCL_BUFFSIZE") or str(DEFAULT_BUFFER)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"HCCL_BUFFSIZE is {text!r}, it must be a whole number of MB from 1")
    return int(text) * MIB


def distribution(
    chip: str, ranks: int, experts: int, top_k: int, hidden: int, shared_ranks: int = 0
) -> Distribution | None:
    """How MC2 spreads a layer, or None on a chip that its operators are not documented for.

    :param shared_ranks: those that hold the shared experts alone. To the operators they are one shared expert.
    """
    kind = generation(chip)
    if kind is None:
        return None
    a3 = "fullmesh_v1"
    algorithm = a3 if kind == "A3" else HIERARCHY if ranks in HIERARCHICAL_RANKS else FULL_MESH
    return Distribution(
        generation=kind,
        algorithm=algorithm,
        ranks=ranks,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        shared_ranks=shared_ranks,
    )


def distribution_of(config: "VllmConfig", chip: str) -> Distribution | None:
    """How MC2 would spread the layers of an engine's model, or None on a chip without it."""
    model, parallel = config.model_config, config.parallel_config
    return distribution(
        chip,
        parallel.tensor_parallel_size * parallel.data_parallel_size,
        model.get_num_experts(),
        getattr(model.hf_text_config, "num_experts_per_tok", None) or 1,
        model.get_hidden_size(),
        shared_placement(config).ranks,
    )


def wanted(config: "VllmConfig", chip: str) -> bool:
    """Whether layers of this engine may go by MC2, so that the communicator is needed. Every rank finds the same.

    float32, which the device does not take, goes that way only where it is asked for by name.
    """
    model, parallel = config.model_config, config.parallel_config
    preferred = preferred_way(config)
    if model is None or not model.is_moe or not parallel.enable_expert_parallel:
        return False
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if preferred not in (None, Way.MC2) or ranks == 1:
        return False
    layer = distribution_of(config, chip)
    if layer is None or layer.refusals():
        return False
    gathers = parallel.tensor_parallel_size > 1 and not parallel.use_sequence_parallel_moe
    worth = layer.shared_ranks > 0 or worth_sending(layer.generation, ranks, layer.top_k, gathers=gathers)
    return preferred is Way.MC2 or (worth and model.dtype in HALVES)


def open_group(config: "VllmConfig") -> None:
    """Open the communicator where it is :func:`wanted`. Called once by every rank, behind vLLM's groups: opening is
    not allowed while a graph is captured.
    """
    if not wanted(config, current_platform.get_device_name()):
        return
    ep = get_ep_group()
    process_group = dist.new_group(ep.ranks, backend="hccl", use_local_synchronization=True)
    remember(
        Opened(
            name=communicator_name(process_group),
            rank=ep.rank_in_group,
            ranks=ep.world_size,
            buffer_bytes=hccl_buffer_bytes(),
            process_group=process_group,
        )
    )
