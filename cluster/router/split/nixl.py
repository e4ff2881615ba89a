"""NixlConnector: the first engine's answer tells where its blocks are, the second one reads them there.

Protocol: vLLM 0.32, ``nixl/pull_scheduler.py`` (what is read of a request's parameters, what is answered).
"""

from __future__ import annotations

from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.split.base import Handoff, Params


class Nixl(Handoff):
    """Passes the answer on."""

    connectors = ("NixlConnector", "NixlPullConnector")

    def prefill(self, transfer: str) -> Params | None:
        """Keep the blocks: another engine decodes."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode(
        self, transfer: str, told: Params | None, source: EngineEndpoint, rank: int | None
    ) -> Params | None:
        """What the first engine said, unchanged."""
        if not told:
            raise ValueError(f"engine {source.engine_id!r} did not say where the prompt's blocks are")
        return told
