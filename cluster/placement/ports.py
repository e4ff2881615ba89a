"""Which ports the workers of an engine may take on a node, so that engines on one host never meet.

The blocks follow from NPU indices alone: an NPU belongs to one engine, so the block of an engine's first NPU on a
node is its own. Nothing has to be remembered, and a restarted controller gives the same answer. All blocks lie above
Linux's usual range of ephemeral ports (32768 to 60999), which HCCL's own default of 60000 does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from .plan import Bundle

HCCL_BASE = 61_000
HCCL_BLOCK = 16
"""Ports that HCCL takes from HCCL_IF_BASE_PORT on (documentation of that variable)."""


def hccl_bases(bundles: Iterable[Bundle]) -> dict[str, int]:
    """Return HCCL_IF_BASE_PORT of an engine on each of its nodes, by node id.

    Nodes whose NPUs Ray chooses itself are left out: there HCCL's default stays.
    """
    first: dict[str, int] = {}
    for bundle in bundles:
        if bundle.npu is not None:
            first[bundle.node_id] = min(bundle.npu, first.get(bundle.node_id, bundle.npu))
    return {node_id: HCCL_BASE + HCCL_BLOCK * npu for node_id, npu in first.items()}
