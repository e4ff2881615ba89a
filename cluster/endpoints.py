"""Engine endpoints: what the controller publishes and the router and gateway watch.

One :class:`EngineEndpoint` is one engine (one replica of a model deployment) that serves
``vllm.grpc.engine.VllmEngine``. A :class:`Snapshot` is the whole set at one version; versions only grow
within one ``epoch`` (the life of one controller process), so a watcher that sees a new epoch starts over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """What an engine does of a request, by the names that vLLM's documentation has for it."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def partner(self) -> Role | None:
        """The role whose engines this one hands KV caches to or takes them from."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self)


class EngineState(StrEnum):
    """Life of an engine as seen by the router: only READY engines are picked."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """Where one engine listens and what it serves."""

    engine_id: str  # unique per life: a restarted engine has a new id
    model: str  # the name clients ask for
    address: str  # host:port of the gRPC service
    metrics_url: str  # http://host:port/metrics
    state: EngineState = EngineState.STARTING
    device: str = ""  # e.g. "npu Ascend910B3" or "virtual npu Ascend910B3"
    node_id: str = ""
    role: str = "both"  # prefill | decode | both
    serves: str = ""  # the name clients ask for, where the model deployment has another one of its own
    kv_connector: str = ""  # vLLM's, by which it hands prompts to another engine; "" without any
    kv_engine_id: str = ""  # its name there
    npus: int = 1
    ranks: int = 1  # data-parallel ones: each takes requests of its own
    places: tuple[str, ...] = ()  # where its workers sit, by rank: NODE_ID:NUMBER
    ready_at: float = 0.0  # seconds since the epoch, 0 where nobody knows
    generation: str = ""  # engines of one model and generation are alike; a rolling update changes it
    labels: dict[str, str] = field(default_factory=dict)

    def asked_for(self) -> EngineEndpoint:
        """The same with the name that clients ask for as its model, which is all that routers want to know."""
        return replace(self, model=self.serves, serves="") if self.serves else self

    @property
    def rank_ids(self) -> tuple[str, ...]:
        """What routers know its data-parallel ranks by: the engine's own id where there is one rank alone."""
        if self.ranks == 1:
            return (self.engine_id,)
        return tuple(f"{self.engine_id}#{rank}" for rank in range(self.ranks))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All endpoints of the fleet at one version."""

    epoch: str
    version: int
    endpoints: tuple[EngineEndpoint, ...] = ()

    def ready(self, model: str | None = None) -> tuple[EngineEndpoint, ...]:
        """The engines that may take requests, optionally of one model."""
        return tuple(
            e for e in self.endpoints if e.state is EngineState.READY and (model is None or e.model == model)
        )


class EndpointSource(Protocol):
    """Something that knows the engines: the controller, or a static list."""

    def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the present snapshot at once, then every newer one; never ends by itself.

        A source that loses its backend keeps the last snapshot and reconnects.
        """
        ...
