"""MooncakeConnector: both engines are told the name of the transfer, the second one also whom to ask for it.

Protocol: vLLM 0.32, ``mooncake/mooncake_connector.py``. A prefill engine registers its workers with a bootstrap server,
on the port ``VLLM_MOONCAKE_BOOTSTRAP_PORT`` of its first rank's node unless its ``kv_connector_extra_config`` says
otherwise; the decoding engine asks there.
"""

from __future__ import annotations

from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.split.base import Handoff, Params

BOOTSTRAP = "kv_bootstrap"
"""Label of an endpoint: HOST:PORT of its bootstrap server."""

BOOTSTRAP_PORT = 8998
"""vLLM's default."""


class Mooncake(Handoff):
    """Names the transfer and the bootstrap server."""

    connectors = ("MooncakeConnector",)

    def prefill(self, transfer: str) -> Params | None:
        """Keep the blocks for the transfer of this name."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}

    def decode(
        self, transfer: str, told: Params | None, source: EngineEndpoint, rank: int | None
    ) -> Params | None:
        """Read the transfer of this name from that engine's rank."""
        if not source.kv_engine_id:
            raise ValueError(f"engine {source.engine_id!r} does not tell its id for KV transfers")
        host = source.address.rpartition(":")[0]
        place = source.labels.get(BOOTSTRAP) or f"{host}:{BOOTSTRAP_PORT}"
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": source.kv_engine_id if rank is None else f"{source.kv_engine_id}_dp{rank}",
            "remote_bootstrap_addr": f"http://{place}",
        }
