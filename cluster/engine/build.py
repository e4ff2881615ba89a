"""Makes vLLM's AsyncLLM inside an engine, with its workers in the engine's own placement group.

Call :func:`start` in a process that serves one engine only: vLLM takes part of its settings from the
process's environment, so they are set here for the whole process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from .. import env
from ..config import ModelConfig
from ..placement import ray_state
from ..placement.plan import Plan
from ..placement.ports import hccl_bases
from ..placement.rank_table import rank_table
from . import membership, serve_log, sockets, worker_launch

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.v1.engine.async_llm import AsyncLLM

MAX_LOGPROBS = 21
"""OpenAI allows 20; the gateway asks for one more, because the service puts the sampled token among them."""


async def start(model: ModelConfig, plan: Plan, group: PlacementGroup) -> AsyncLLM:
    """Start the engine core and its workers and return the AsyncLLM once the model can answer.

    Raises:
        ValueError: if vLLM refuses the engine arguments.
        RuntimeError: if an engine core does not come up; the cause is in the engine's log.
    """
    prepare_environment(plan)
    return await asyncio.to_thread(_start, model, plan, group)


def preload() -> None:
    """Import what :func:`start` needs, which takes seconds, while something else is waited for."""
    for module in ("vllm.engine.arg_utils", "vllm.v1.engine.async_llm", f"{__package__}.executor"):
        importlib.import_module(module)


def prepare_environment(plan: Plan) -> None:
    """Set what vLLM reads from the environment of this process and of the engine core, its child."""
    import ray

    # Serve runs constructors in a thread where vLLM does not see that it is inside an actor; without an
    # address the
    # engine core would start a Ray cluster of its own, and a forked core hangs in Ray.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    os.environ[membership.HOST_ADDRESS] = ray.util.get_node_ip_address()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(bundle.rank) for bundle in plan.bundles)
    os.environ.setdefault("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "HCCL_,NPUFLEET_")
    os.environ.setdefault(
        "VLLM_DO_NOT_TRACK", "1"
    )  # serving on a closed network must not wait for a phone home


def _start(model: ModelConfig, plan: Plan, group: PlacementGroup) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from .executor import FleetExecutor

    several = model.data_parallel_size > 1
    args = AsyncEngineArgs(
        **{**_engine_arguments(model), **_bound(model, plan)},
        model=model.source,
        served_model_name=[model.asked_for],
        distributed_executor_backend=FleetExecutor,
        max_logprobs=MAX_LOGPROBS,
        kv_events_config=model.engine.get("kv_events_config") or _kv_events(model, plan),
        data_parallel_backend="ray" if several else "mp",
    )
    with serve_log.kept():  # vLLM configures logging here
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    config.parallel_config.placement_group = group
    config.parallel_config.ray_runtime_env = _worker_environment(plan, _rank_table(model, plan))
    if several:
        from .data_parallel import start as start_ranks

        return start_ranks(config, plan, group)
    return AsyncLLM.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)


def _engine_arguments(model: ModelConfig) -> dict[str, Any]:
    from .args import engine_part

    given = {name: value for name, value in engine_part(model.engine).items() if name != "kv_events_config"}
    if transfer := given.get("kv_transfer_config"):
        from vllm.config import KVTransferConfig

        given["kv_transfer_config"] = KVTransferConfig(**transfer)
    return given


def _bound(model: ModelConfig, plan: Plan) -> dict[str, Any]:
    """Tell the workers which NPU of their node each rank gets, where the plan knows it: Ray itself would number
    those that it reserved in an order of its own.
    """
    npus = [bundle.npu for bundle in plan.bundles]
    if None in npus:
        return {}
    return {"additional_config": {**(model.engine.get("additional_config") or {}), "npus": npus}}


def _kv_events(model: ModelConfig, plan: Plan) -> Any:
    """Return the settings that make vLLM publish its KV events to the engine's own service, or None where it
    shall not. Each data-parallel rank has sockets of its own, of which vLLM tells its front end.

    Unix sockets in the engine's folder, so that nothing listens on the network; free ports of their nodes' own
    addresses, as the ranks' other sockets are, where ranks sit on several nodes.
    """
    from vllm.config.kv_events import KVEventsConfig

    if model.engine.get("enable_prefix_caching") is False:
        return None
    events = replay = "tcp://*:0"
    if model.data_parallel_size == 1 or len({bundle.node_id for bundle in plan.bundles}) == 1:
        # A rank beyond the first appends its number to an address with "inproc" in it, and refuses other files.
        folder = os.environ[sockets.BASE]
        events, replay = f"ipc://{folder}/inproc-events", f"ipc://{folder}/inproc-replay"
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay
    )


def _rank_table(model: ModelConfig, plan: Plan) -> dict[str, str]:
    """Return what tells the workers HCCL's rank table, nothing unless it is asked for."""
    if not model.rank_table:
        return {}
    import ray

    if any(bundle.npu is None for bundle in plan.bundles):
        raise ValueError(
            f"model {model.name!r}: a rank table needs nodes that tell their NPUs: start Ray there with the flags of "
            "`npufleet node`, or leave rank_table out"
        )
    nodes = {node.node_id: node for node in ray_state.topology(ray.nodes()).nodes}
    return {env.RANK_TABLE: json.dumps(rank_table(plan, nodes))}


def _worker_environment(plan: Plan, more: dict[str, str]) -> Any:
    """Return the runtime environment of the workers: which virtual NPUs there are must be known before
    torch loads.

    On a node that was started with the setting this changes nothing; with none set here there is nothing to
    pass on.
    """
    from ray.runtime_env import RuntimeEnv

    device = os.environ.get(env.DEVICE)
    return RuntimeEnv(
        env_vars={
            sockets.BASE: os.environ[sockets.BASE],
            **({env.DEVICE: device} if device else {}),
            **more,
        },
        py_executable=worker_launch.command(sys.executable, _hccl_ports(plan)),
    )


def _hccl_ports(plan: Plan) -> dict[str, int]:
    """HCCL's ports by the address of each node, where the plan knows the NPUs."""
    import ray

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    bases = hccl_bases(plan.bundles)
    return {addresses[node_id]: port for node_id, port in bases.items() if node_id in addresses}
