"""Which names vLLM's ``EngineArgs`` knows, read from its source without importing it.

Importing ``vllm`` takes seconds and loads torch; the command line checks a configuration before anything
starts, so it reads the class bodies instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from .. import checks
from . import values

OWNED = {
    "model": "set models[].source",
    "served_model_name": "set models[].name",
    "distributed_executor_backend": "engines always run their workers as Ray actors",
    "ray_runtime_env": "the fleet prepares the workers' environment itself",
    "worker_cls": "the plugin chooses the worker",
    "max_logprobs": "engines always offer what the gateway needs",
    "enable_log_requests": "ask for it with logging, not with an engine argument",
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_backend",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
        ),
        "set data_parallel_size, the fleet places and joins the ranks",
    ),
}
"""Arguments that the fleet sets itself, and what to do instead."""

ADDITIONAL = ("moe_communication", "shared_experts", "shared_expert_ranks", "shared_experts_overlap")
"""What the plugin reads of ``additional_config``."""

WAYS = ("auto", "all-gather", "all-to-all", "mc2")
"""How tokens and experts of different NPUs may meet."""

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""The ways to split an engine; their product is its NPUs."""

CONTEXT = "decode_context_parallel_size"
"""Spreads the KV cache of a sequence over ranks that share each layer; it takes no further NPUs."""
POSITIVE = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""Numbers that vLLM takes as they are, whatever they are."""

ONE_FOR_NOW = (
    "prefill_context_parallel_size",
    "nnodes",
)
"""Ways to split an engine that this version does not place: only the value 1 is accepted."""


@cache
def of_engine() -> frozenset[str]:
    """Return the names of all fields of vLLM's ``EngineArgs`` and ``AsyncEngineArgs``.

    Raises:
        ValueError: if vLLM is not installed.
    """
    return values.names(*values.ARGUMENTS[0])


@cache
def of_frontend() -> frozenset[str]:
    """Return the names of vLLM's frontend arguments that belong to a model: chat template, parsers and the
    like.
    """
    return values.names(*values.ARGUMENTS[1])


def known() -> frozenset[str]:
    """Return every name that ``models[].engine`` may hold."""
    return of_engine() | of_frontend()


def engine_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that concern the engine; the others are the gateway's."""
    return {name: value for name, value in given.items() if name in of_engine()}


def check(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the engine arguments of one model deployment, all of them known and left to the user.

    Raises:
        ValueError: for an unknown name, a name the fleet sets itself, or a split it cannot place.
    """
    arguments = checks.mapping(given, where, known())
    for name, instead in OWNED.items():
        if name in arguments:
            raise ValueError(f"{where}: {name} is not yours to set here: {instead}")
    for name in ONE_FOR_NOW:
        if arguments.get(name, 1) != 1:
            raise ValueError(
                f"{where}: {name} is {arguments[name]!r}; this version places engines with {name} 1 only. "
                "Use tensor_parallel_size inside one node, and more engines for more throughput"
            )
    for name in SIZES:
        checks.integer(arguments.get(name, 1), f"{where}.{name}", 1, 1024)
    context = checks.integer(arguments.get(CONTEXT, 1), f"{where}.{CONTEXT}", 1, 1024)
    tensor = arguments.get("tensor_parallel_size", 1)
    if tensor % context:
        raise ValueError(
            f"{where}: {CONTEXT} is {context}, which does not divide tensor_parallel_size {tensor}; the ranks that "
            "share each layer are those that share a sequence's KV cache"
        )
    values.check(arguments, where)
    for name in POSITIVE:
        if arguments.get(name) is not None:
            checks.integer(arguments[name], f"{where}.{name}", 1, 1 << 50)
    _check_additional(arguments.get("additional_config"), f"{where}.additional_config")
    return arguments


def _check_additional(given: object, where: str) -> None:
    """``additional_config`` is vLLM's place for what a hardware plugin reads, so only ours tells of a wrong key."""
    if given is not None:
        asked = checks.mapping(given, where, ADDITIONAL)
        checks.choice(asked.get("moe_communication", "auto"), f"{where}.moe_communication", WAYS)
