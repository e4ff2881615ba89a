"""Connectors whose engines share a store: what one has computed, the other finds by its tokens."""

from __future__ import annotations

from npufleet.cluster.endpoints import EngineEndpoint
from npufleet.cluster.router.split.base import Handoff, Params


class SharedStore(Handoff):
    """Nothing needs to be said."""

    connectors = (
        "ExampleConnector",
        "MooncakeStoreConnector",
        "LMCache*",
        "FlexKV*",
        "HF3FS*",
    )

    def prefill(self, transfer: str) -> Params | None:
        """None: the engine stores all it computes."""
        return None

    def decode(
        self, transfer: str, told: Params | None, source: EngineEndpoint, rank: int | None
    ) -> Params | None:
        """None: the engine looks there for all it is asked."""
        return None
