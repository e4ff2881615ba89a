"""What the fleet shall be: a FleetConfig, and how many engines each model has now.

The wish travels as the ``user_config`` of controller and front end: Serve keeps it with its own state, hands it
to a replica that restarts, and tells a running one of a change without restarting it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import (
    FleetConfig,
    GatewayConfig,
    MetricsConfig,
    ModelConfig,
    PlacementConfig,
    RouterConfig,
    from_dict,
)
from ..engine.args import engine_part

MOST_ENGINES = 4096


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A FleetConfig and the number of engines of each of its models."""

    config: FleetConfig
    engines: Mapping[str, int]
    cordoned: tuple[str, ...] = ()  # ids of nodes whose engines leave and that get no new ones
    lent: tuple[str, ...] = ()  # models with one engine more, so that one can leave a cordoned node
    fenced: Mapping[str, float] = field(default_factory=dict)
    """NPUs (NODE_ID:NUMBER) that no engine is to get, and until when, seconds since the epoch: kept here so that a
    controller that restarts knows them."""
    previous: Wish | None = None  # where a change under way goes back to if it fails

    @classmethod
    def of(cls, config: FleetConfig) -> Wish:
        """Return the wish of a fleet that begins: as many engines as the configuration says."""
        return cls(config=config, engines={model.name: model.engines for model in config.models})

    def model(self, name: str) -> ModelConfig | None:
        """Return the model deployment of that name."""
        return next((model for model in self.config.models if model.name == name), None)

    def effective(self) -> FleetConfig:
        """Return the configuration with the number of engines that each model has now."""
        models = (replace(model, engines=self.engines[model.name]) for model in self.config.models)
        return replace(self.config, models=tuple(models))

    def changed_to(self, config: FleetConfig) -> Wish:
        """Return the wish after `deploy` of ``config``.

        A number of engines that was set by hand is overruled; one that follows the load stays, within its new
        bounds.
        """
        engines = {}
        for model in config.models:
            now = self.engines.get(model.name)
            follows = model.scaling if now is not None else None
            engines[model.name] = follows.clamp(now or 0) if follows else model.engines
        return Wish(config=config, engines=engines, cordoned=self.cordoned, fenced=self.fenced)

    def resized(self, model: str, engines: int) -> Wish:
        """Return the wish after `scale` by hand: the configuration says the new number too.

        Raises:
            ValueError: if there is no such model, or it cannot have so many engines.
        """
        found = self.model(model)
        if found is None:
            known = ", ".join(repr(entry.name) for entry in self.config.models)
            raise ValueError(f"the fleet has no model {model!r}; it has {known}")
        if not 0 <= engines <= MOST_ENGINES:
            raise ValueError(f"{engines} engines of {model!r}: expected 0 to {MOST_ENGINES}")
        if found.scaling is not None and found.scaling.clamp(engines) != engines:
            raise ValueError(
                f"the number of engines of {model!r} follows the load between {found.scaling.min} and "
                f"{found.scaling.max}; change its bounds with `npufleet deploy`"
            )
        return self.scaled(model, engines)

    def with_cordon(self, node_id: str, closed: bool) -> Wish:
        """Return the wish with a node closed to engines, or open again."""
        others = tuple(node for node in self.cordoned if node != node_id)
        return replace(self, cordoned=(*others, node_id) if closed else others)

    def lend(self, more: Mapping[str, int]) -> Wish:
        """Return the wish with one engine more (1) or less (-1) of some models, remembered as lent."""
        engines = {model: count + more.get(model, 0) for model, count in self.engines.items()}
        lent = {*self.lent, *(model for model, change in more.items() if change > 0)}
        lent -= {model for model, change in more.items() if change < 0}
        return replace(self, engines=engines, lent=tuple(sorted(lent)))

    def scaled(self, model: str, engines: int) -> Wish:
        """Return the wish with another number of engines for one model."""
        return replace(self, engines={**self.engines, model: engines})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` reads back to an equal wish."""
        return {
            "config": self.config.to_dict(),
            "engines": dict(self.engines),
            "cordoned": list(self.cordoned),
            "lent": list(self.lent),
            "fenced": dict(self.fenced),
            "previous": self.previous.to_dict() if self.previous else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Wish:
        """Return the wish that ``data`` describes."""
        previous = data["previous"]
        return cls(
            config=from_dict(data["config"]),
            engines=dict(data["engines"]),
            cordoned=tuple(data["cordoned"]),
            lent=tuple(data["lent"]),
            fenced=dict(data.get("fenced", {})),  # a controller of an older release knows none
            previous=cls.from_dict(previous) if previous else None,
        )


def engine_fleet(config: FleetConfig, model: ModelConfig) -> FleetConfig:
    """Return the part of ``config`` that an engine of ``model`` depends on, everything else at its default.

    Engines restart when, and only when, this changes: not for another policy, another number of engines or an
    argument that only the gateway reads.
    """
    return FleetConfig(
        models=(replace(model, engines=1, scaling=None, priority=0, engine=engine_part(model.engine)),),
        name=config.name,
        device=config.device,
        router=RouterConfig(secret=config.router.secret, engine_tls=config.router.engine_tls),
        gateway=GatewayConfig(),
        metrics=MetricsConfig(host=config.metrics.host),
        placement=PlacementConfig(),
        healing=config.healing,
    )


def generation(config: FleetConfig, model: ModelConfig) -> str:
    """Return the name of the present generation of the engines of ``model``: a digest of what they are."""
    return digest(engine_fleet(config, model).to_dict())


def digest(data: Any) -> str:
    """Return eight hexadecimal digits that stand for plain data."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
