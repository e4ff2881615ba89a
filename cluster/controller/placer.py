"""The controller's part in placement: which engines sit, which are still wanted, who has to leave."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import FleetConfig
from ..placement import requests
from ..placement.ledger import Ledger
from ..placement.plan import NoRoom, Placed, Plan, Request, placed_as
from ..placement.ray_state import State, exact
from ..topology.model import Node
from .progress import Phase, ProgressBoard
from .registry import Registry

HOPELESS = (Phase.FAILED, Phase.REFUSED)


@dataclass(kw_only=True)
class Placer:
    """Plans one engine after the other. Its calls must not overlap: the state that they are given would be old."""

    config: FleetConfig
    registry: Registry
    progress: ProgressBoard
    ledger: Ledger = field(default_factory=Ledger)
    leaving: dict[str, str] = field(default_factory=dict)
    """Engines that have to end, and why."""

    def place(self, state: State, engine_id: str, model: str, home: str = "") -> dict[str, Any]:
        """Plan one engine and hold the NPUs for it; among places that cost the same, on ``home``, the node of its
        process: an engine on one node is not lost with another.

        Returns ``{"nodes": [node id by rank], "npus": [index by rank, None where Ray chooses], "device": text}``,
        or ``{"refused": why, "never": bool}``: this is an answer, not a fault, and the engine asks again unless
        ``never`` is true.
        """
        request = requests.of(next(m for m in self.config.models if m.name == model), engine_id)
        try:
            plan = self.ledger.reserve(
                first(state, home),
                request,
                time.monotonic(),
                others=self.missing(state, request),
                describe=self.describe,
                preempt=self.config.placement.preempt,
            )
        except NoRoom as error:
            return {"refused": str(error), "never": error.never}
        if plan.preempts:
            why = f"engine {engine_id} of {model!r} has a higher priority ({request.priority})"
            self.leaving |= dict.fromkeys(plan.preempts, why)
            return {"refused": f"waiting for {', '.join(plan.preempts)} to make room", "never": False}
        return self._answer(state, plan)

    def _answer(self, state: State, plan: Plan) -> dict[str, Any]:
        known = exact(state.topology)
        nodes = {node.node_id: node for node in state.topology.nodes}
        return {
            "nodes": [bundle.node_id for bundle in plan.bundles],
            "npus": [bundle.npu if bundle.node_id in known else None for bundle in plan.bundles],
            "device": self.device(nodes[plan.bundles[0].node_id]),
        }

    def device(self, node: Node) -> str:
        """Return what an engine on this node runs on, in words."""
        kind = "virtual npu" if self.config.device == "virtual" else "npu"
        return f"{kind} {node.soc}".strip()

    def models(self) -> dict[str, str]:
        """Return the model of each engine that has been heard of, by engine id."""
        told = {entry.engine_id: entry.model for entry in self.progress.all()}
        return told | {entry.engine_id: entry.model for entry in self.registry.snapshot().endpoints}

    def describe(self, engine_id: str) -> Placed | None:
        """Return what is known of an engine that sits already, None for what is no engine of this fleet."""
        name = self.models().get(engine_id)
        model = next((model for model in self.config.models if model.name == name), None)
        if model is None:
            return None
        return placed_as(requests.of(model, engine_id), ())

    def missing(self, state: State, asking: Request) -> list[Request]:
        """Return the engines that the configuration wants and that have no NPUs yet, without the one that asks.

        Models whose engines fail to start are left out: nobody may be waiting for that room.
        """
        told = self.models()
        sitting = Counter(
            told.get(name, "") for name in {*state.groups, *self.ledger.promises} - {asking.engine_id}
        )
        sitting[asking.model] += 1
        failing = {entry.model for entry in self.progress.all() if entry.phase in HOPELESS}
        return [
            requests.of(model, f"{model.name} {i}")
            for model in self.config.models
            if model.name not in failing
            for i in range(sitting[model.name], model.engines)
        ]

    def forget(self, engine_id: str) -> None:
        """An engine is gone, or gave up: nothing is promised to it, and it need not leave any more."""
        self.ledger.release(engine_id)
        self.leaving.pop(engine_id, None)


def first(state: State, home: str) -> State:
    """Return ``state`` with the node ``home`` as the first one, which the planner prefers among equal ones."""
    ordered = sorted(state.topology.nodes, key=lambda node: node.node_id != home)
    return replace(state, topology=replace(state.topology, nodes=tuple(ordered)))


def nodes(state: State, models: dict[str, str], cordoned: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the nodes of the fleet with their NPUs and who holds them, as plain data for status answers.

    ``closed`` says why no engine comes to a node: "drained" by a user, "leaving" because Ray takes it away.
    """
    shut = dict.fromkeys(cordoned, "drained") | dict.fromkeys(state.draining, "leaving")
    holders = {
        (bundle.node_id, bundle.npu): name for name, bundles in state.groups.items() for bundle in bundles
    }
    return [
        {
            "node_id": node.node_id,
            "address": node.address,
            "chip": node.soc,
            "super_pod": node.super_pod,
            "failure_domain": node.failure_domain,
            "closed": shut.get(node.node_id, ""),
            "npus": node.npus,
            "reserved": state.held(node.node_id),
            "devices": [
                {
                    "npu": npu.index,
                    "healthy": npu.healthy,
                    "engine": (holder := holders.get((node.node_id, npu.index), "")),
                    "model": models.get(holder, ""),
                }
                for npu in node.devices
            ],
        }
        for node in state.topology.nodes
    ]
