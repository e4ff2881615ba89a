"""Placement groups: a plan made real in Ray.

The engine that creates a group owns it: when the engine's process ends, however it ends, Ray removes the
group and the workers in it, so no NPU can leak.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..topology.labels import RESOURCE, npu_resource
from .plan import Bundle, Plan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

NODE_ID_LABEL = "ray.io/node-id"  # Ray sets it on every node


class PlacementTimeout(RuntimeError):
    """Ray did not give the planned NPUs in time."""


async def create(plan: Plan, seconds: float) -> PlacementGroup:
    """Reserve the NPUs of ``plan``, one bundle for each rank in rank order, and wait until Ray holds them.

    Args:
        plan: where each rank sits; the group is named after its engine.
        seconds: how long to wait.

    Raises:
        PlacementTimeout: if Ray has not placed the group in time; the group is removed again.
    """
    from ray.util.placement_group import placement_group

    group = placement_group(
        bundles=[resources(bundle) for bundle in plan.bundles],
        name=plan.engine_id,
        bundle_label_selector=[{NODE_ID_LABEL: bundle.node_id} for bundle in plan.bundles],
    )
    placed = False
    try:
        await asyncio.wait_for(_ready(group), seconds)
        placed = True
    except TimeoutError as error:
        nodes = sorted({bundle.node_id[:12] for bundle in plan.bundles})
        raise PlacementTimeout(
            f"Ray did not reserve {len(plan.bundles)} NPU(s) on {', '.join(nodes)} for engine "
            f"{plan.engine_id} within {seconds:.0f} s; something outside the fleet may hold them"
        ) from error
    finally:
        if not placed:
            await asyncio.to_thread(remove, group)
    return group


def resources(bundle: Bundle) -> dict[str, float]:
    """Return what Ray reserves for one rank: an NPU, and this one where Ray knows which is which."""
    return {RESOURCE: 1.0, **({} if bundle.npu is None else {npu_resource(bundle.npu): 1.0})}


async def _ready(group: PlacementGroup) -> None:
    while not await asyncio.to_thread(group.wait, 1):
        pass


def remove(group: PlacementGroup) -> None:
    """Give the NPUs of ``group`` back; removing twice is harmless."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
