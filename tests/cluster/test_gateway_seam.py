"""The one place where the gateway leans on vLLM's internals: AsyncLLM without its constructor.

When one of these fails after an upgrade of vLLM, compare ``gateway/client.py`` and ``gateway/transport.py``
with ``vllm/v1/engine/async_llm.py``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager

from npufleet.cluster.gateway.client import FleetClient
from npufleet.cluster.gateway.metrics import GatewayMetrics, ModelStats
from npufleet.cluster.gateway.settings import GatewaySettings
from npufleet.cluster.gateway.transport import GrpcEngineCore


def attributes_of_self(function: Any, *, stored: bool) -> set[str]:
    """Names X in ``self.X`` that ``function`` stores, or reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    wanted = ast.Store if stored else ast.Load
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, wanted)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_the_client_sets_what_asyncllm_sets() -> None:
    theirs = attributes_of_self(AsyncLLM.__init__, stored=True)
    ours = attributes_of_self(FleetClient.__init__, stored=True)
    only_with_a_frontend_profiler = {"_frontend_profiler_worker_name"}
    assert theirs - only_with_a_frontend_profiler == ours - {"_shortcuts"}


def engine_core_calls(*functions: Any) -> set[str]:
    """Names X in ``self.engine_core.X`` and ``engine_core.X`` of AsyncLLM's methods."""
    names = set()
    for function in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id == "engine_core")
                or (isinstance(node.value, ast.Attribute) and node.value.attr == "engine_core")
            ):
                names.add(node.attr)
    return names


REQUEST_PATH = (
    AsyncLLM.add_request,
    AsyncLLM._add_request,
    AsyncLLM.generate,
    AsyncLLM.abort,
    AsyncLLM._run_output_handler,
    AsyncLLM.get_supported_tasks,
    AsyncLLM.shutdown,
    AsyncLLM.errored.fget,
)


async def test_the_transport_offers_what_the_request_path_calls() -> None:
    core = make_core()
    for name in engine_core_calls(*REQUEST_PATH):
        assert name in vars(core) or hasattr(GrpcEngineCore, name), name


async def test_every_other_call_is_a_clean_refusal() -> None:
    core = make_core()
    methods = [
        member
        for _, member in inspect.getmembers(AsyncLLM, inspect.isfunction)
        if member != AsyncLLM.__init__
    ]
    others = engine_core_calls(*methods) - engine_core_calls(*REQUEST_PATH)
    assert {"sleep_async", "add_lora_async", "reset_prefix_cache_async"} <= others
    for name in others - {"dp_engines_running", "get_kv_event_sources"}:
        with pytest.raises(NotImplementedError, match="not offered by the gateway"):
            await getattr(core, name)()


def make_core() -> GrpcEngineCore:
    nobody: Any = None
    return GrpcEngineCore("m", nobody, GatewaySettings(), GatewayMetrics(), max_model_len=8)


async def test_a_missing_attribute_is_still_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = make_core().no_such_thing


def test_the_stats_offer_what_the_output_handler_calls() -> None:
    for name in ("record", "log", "record_admission_rejection"):
        theirs = inspect.signature(getattr(StatLoggerManager, name)).parameters
        ours = inspect.signature(getattr(ModelStats, name)).parameters
        assert set(theirs) == set(ours), name
