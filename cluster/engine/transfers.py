"""What routers must know to hand this engine's KV blocks to another one."""

from __future__ import annotations

from typing import Any

from ..addresses import netloc
from ..router.split.mooncake import BOOTSTRAP

_LOCAL = ("", "localhost", "127.0.0.1", "::1")


def transfers(async_llm: Any, host: str) -> dict[str, Any]:
    """Return the fields of an ``EngineEndpoint`` that tell of the engine's KV connector; empty without one.

    Of several connectors it is the one that moves blocks between engines, as the stock servicer chooses it. ``host`` is
    the address of the engine's node, by which others reach a bootstrap server that the engine calls its own.
    """
    config: Any = getattr(async_llm, "vllm_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None or not transfer.kv_connector:
        return {}
    from smg_grpc_servicer.vllm.kv_transfer import resolve_pd_connector

    connector, engine_id = resolve_pd_connector(transfer)
    told: dict[str, Any] = {"kv_connector": connector, "kv_engine_id": engine_id}
    if connector == "MooncakeConnector":
        from vllm import envs

        place = transfer.get_from_extra_config("bootstrap_server_address", None)
        if place is None:
            master = config.parallel_config.data_parallel_master_ip
            place = netloc(host if master in _LOCAL else master, envs.VLLM_MOONCAKE_BOOTSTRAP_PORT)
        told["labels"] = {BOOTSTRAP: str(place)}
    return told
