"""Endpoints and snapshots as plain data, for calls between processes that may run different releases."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from ..endpoints import EngineEndpoint, EngineState, Snapshot

_KNOWN = frozenset(item.name for item in fields(EngineEndpoint))


def endpoint_to_dict(endpoint: EngineEndpoint) -> dict[str, Any]:
    """Return ``endpoint`` as plain data."""
    return {**asdict(endpoint), "state": str(endpoint.state), "places": list(endpoint.places)}


def endpoint_from_dict(data: dict[str, Any]) -> EngineEndpoint:
    """Return the endpoint that ``data`` describes; fields of a newer release are left out."""
    known = {key: value for key, value in data.items() if key in _KNOWN}
    places = tuple(known.get("places", ()))
    return EngineEndpoint(**{**known, "state": EngineState(known["state"]), "places": places})


def snapshot_to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return ``snapshot`` as plain data."""
    return {
        "epoch": snapshot.epoch,
        "version": snapshot.version,
        "endpoints": [endpoint_to_dict(endpoint) for endpoint in snapshot.endpoints],
    }


def snapshot_from_dict(data: dict[str, Any]) -> Snapshot:
    """Return the snapshot that ``data`` describes."""
    return Snapshot(
        epoch=data["epoch"],
        version=data["version"],
        endpoints=tuple(endpoint_from_dict(item) for item in data["endpoints"]),
    )
