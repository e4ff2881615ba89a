"""From EndpointSlices to engines, as pure functions.

Source: Kubernetes API ``discovery.k8s.io/v1``, EndpointSlice: a condition that is not given counts as good; one
endpoint may stand in several slices for a while, so those are taken together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from npufleet.cluster.addresses import netloc
from npufleet.cluster.endpoints import EngineEndpoint, EngineState

MODEL_LABEL = "npufleet.io/model"
"""Label of a service, which Kubernetes copies to its slices: the model deployment that its engines serve."""
ROLE_LABEL = "npufleet.io/role"

_BEST = (EngineState.READY, EngineState.DRAINING, EngineState.STARTING)
Slice = Mapping[str, Any]


def engines_of(slices: Iterable[Slice], port: str, model: str) -> tuple[EngineEndpoint, ...]:
    """The engines in ``slices``, in the order of their ids.

    ``port`` is the name or number of the port that serves gRPC; "": the only one, or the one named ``grpc``.
    ``model`` is what engines of a service without the label serve ("": not known). Slices without such a port
    and those of host names (address type FQDN, which Kubernetes deprecates) have none.
    """
    found: dict[str, EngineEndpoint] = {}
    for piece in slices:
        number = port_of(piece.get("ports") or [], port)
        if number is None or piece.get("addressType") == "FQDN":
            continue
        labels = piece.get("metadata", {}).get("labels") or {}
        for item in piece.get("endpoints") or []:
            engine = _engine(item, number, labels, model)
            known = found.get(engine.engine_id)
            if known is None or _BEST.index(engine.state) < _BEST.index(known.state):
                found[engine.engine_id] = engine
    return tuple(found[engine_id] for engine_id in sorted(found))


def port_of(ports: Iterable[Mapping[str, Any]], wanted: str) -> int | None:
    """The number of the port that ``wanted`` means, None where there is none."""
    usable = [p for p in ports if p.get("protocol", "TCP") == "TCP" and isinstance(p.get("port"), int)]
    if wanted:
        matching = [p for p in usable if wanted in (p.get("name"), str(p["port"]))]
    else:
        matching = usable if len(usable) == 1 else [p for p in usable if p.get("name") == "grpc"]
    return int(matching[0]["port"]) if matching else None


def _engine(item: Mapping[str, Any], port: int, labels: Mapping[str, str], model: str) -> EngineEndpoint:
    address = netloc(item["addresses"][0], port)  # the others mean the same endpoint
    pod = item.get("targetRef") or {}
    # A pod that is made anew has another uid, so its engine another id.
    engine_id = f"{pod['name']}-{pod['uid'][:8]}" if pod.get("name") and pod.get("uid") else address
    return EngineEndpoint(
        engine_id=engine_id,
        model=labels.get(MODEL_LABEL) or model,
        address=address,
        metrics_url="",
        state=_state(item.get("conditions") or {}),
        node_id=item.get("nodeName") or "",
        role=labels.get(ROLE_LABEL) or "both",
    )


def _state(conditions: Mapping[str, bool | None]) -> EngineState:
    if conditions.get("terminating"):
        return EngineState.DRAINING
    return EngineState.STARTING if conditions.get("ready") is False else EngineState.READY
