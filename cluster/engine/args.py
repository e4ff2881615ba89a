"""Which names vLLM's ``EngineArgs`` knows, read from its source without importing it.

Importing ``vllm`` takes seconds and loads torch; the command line checks a configuration before anything
starts, so it reads the class bodies instead.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .. import checks

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

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""The ways to split an engine; their product is its NPUs."""

CONTEXT = "decode_context_parallel_size"
"""Spreads the KV cache of a sequence over ranks that share each layer; it takes no further NPUs."""

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
    return _fields("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))


@cache
def of_frontend() -> frozenset[str]:
    """Return the names of vLLM's frontend arguments that belong to a model: chat template, parsers and the
    like.
    """
    return _fields("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs",))


def known() -> frozenset[str]:
    """Return every name that ``models[].engine`` may hold."""
    return of_engine() | of_frontend()


def engine_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that concern the engine; the others are the gateway's."""
    return {name: value for name, value in given.items() if name in of_engine()}


def _fields(file: str, classes: tuple[str, ...]) -> frozenset[str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vllm is not installed; run `make setup`")
    source = Path(spec.submodule_search_locations[0]) / file
    return frozenset(
        item.target.id
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


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
    return arguments
