"""The answer to `npufleet status`, as plain data."""

from __future__ import annotations

from typing import Any

from ..deploy.wish import generation
from ..placement.ray_state import State
from .changes import Changes
from .progress import ProgressBoard
from .registry import Registry
from .wire import endpoint_to_dict


def status(changes: Changes, registry: Registry, progress: ProgressBoard, state: State) -> dict[str, Any]:
    """Return what the fleet shall be and what there is."""
    wish = changes.wish
    snapshot = registry.snapshot()
    return {
        "fleet": wish.config.name,
        "device": wish.config.device,
        "epoch": snapshot.epoch,
        "version": snapshot.version,
        "npus": {
            "total": state.topology.npus,
            "reserved": sum(len(bundles) for bundles in state.groups.values()),
        },
        "models": [
            {
                "name": model.name,
                "wanted": wish.engines[model.name],
                "ready": len(snapshot.ready(model.name)),
                "generation": generation(wish.config, model),
            }
            for model in wish.config.models
        ],
        "engines": [endpoint_to_dict(endpoint) for endpoint in snapshot.endpoints],
        "progress": [entry.to_dict() for entry in progress.all()],
        "change": changes.change.to_dict() if changes.change else None,
    }
