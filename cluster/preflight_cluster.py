"""What `npufleet serve --address` sees of a Ray cluster before it submits anything to it.

Each failure is a ``ValueError`` that names what was given and how to mend it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from . import preflight
from .config import FleetConfig, GatewayConfig, RouterConfig
from .doctor import hardware
from .doctor.examine import DOORS, doors_of, models_of, ports_of
from .doctor.finding import Finding, Level
from .doctor.local import free_port
from .doctor.nodes import on_each
from .placement import planner, ray_state, requests
from .placement.plan import NoRoom
from .topology.model import Node


def check(config: FleetConfig, application: str, say: Callable[[str], None]) -> None:
    """See whether the cluster that this process is connected to can serve ``config``.

    Args:
        config: what is to be served.
        application: the name of the Serve application that it becomes.
        say: is told what is odd, but no reason to stop.
    """
    named_ports(config)
    nobody_else(config, application)
    state = ray_state.read()
    preflight.layout(config, state.topology)
    homes = _planned(config, state, say)
    answers = on_each(
        state.topology.nodes, _look, ports_of(config), models_of(config), sys.executable,
        config.gateway, config.router,
    )  # fmt: skip
    for node in state.topology.nodes:
        answer = answers[node.node_id]
        if isinstance(answer, str):
            raise ValueError(
                f"node {node.title} does not answer: {answer}; npufleet doctor --nodes all tells more"
            )
        judge(node, answer, planned=node.node_id in homes, say=say)


def named_ports(config: FleetConfig) -> None:
    """Raise ``ValueError`` for a port 0: the doors open on whichever node, and nobody could be told what it became."""
    for name in ("gateway", "router", "metrics"):
        if getattr(config, name).port == 0:
            raise ValueError(
                f"{name}.port: 0 (any free port) is for a fleet with a Ray of its own; on a cluster name the port"
            )


def check_change(config: FleetConfig, say: Callable[[str], None]) -> None:
    """See whether the fleet that runs on this cluster can become ``config``: layouts, checkpoints and
    what its doors need.

    What fits only after something else has left is no mistake; ``say`` is told which nodes lack a checkpoint.
    """
    state = ray_state.read()
    preflight.layout(config, state.topology)
    answers = on_each(
        state.topology.nodes, _look, [], models_of(config), sys.executable, config.gateway, config.router
    )
    lacking: dict[str, list[str]] = {}
    for node in state.topology.nodes:
        answer = answers[node.node_id]
        for finding in [] if isinstance(answer, str) else answer:
            if finding["name"] == DOORS:
                raise ValueError(f"node {node.title}: {finding['text']}; {finding['remedy']}")
            if node.npus:
                lacking.setdefault(finding["text"], []).append(node.title)
    for text, titles in lacking.items():
        if len(titles) == sum(bool(node.npus) for node in state.topology.nodes):
            raise ValueError(f"on every node of the fleet: {text}")
        say(f"warning: nodes {', '.join(titles)}: {text}; no engine can be placed there")


def nobody_else(config: FleetConfig, application: str) -> None:
    """See that no fleet runs on the cluster yet: the new one would silently take its place."""
    from ray import serve

    from .app import CONTROLLER

    if application not in serve.status().applications:
        return
    name = "a fleet"
    try:
        status: Any = (
            serve.get_deployment_handle(CONTROLLER, application).status.remote().result(timeout_s=5.0)
        )
        name = f"the fleet {status['fleet']!r}"
    except (KeyError, TimeoutError, RuntimeError):  # it starts or ends just now
        pass
    raise ValueError(
        f"{name} already runs on this Ray cluster, which serves one fleet at a time; "
        "add the models to its configuration, or stop it first"
    )


def _planned(config: FleetConfig, state: ray_state.State, say: Callable[[str], None]) -> set[str]:
    """The nodes on which the engines would sit now; those that have to wait for room are told."""
    wanted = [
        requests.of(model, f"{model.name} {i}") for model in config.models for i in range(model.engines)
    ]
    homes: set[str] = set()
    for made in planner.plan_all(state.topology, state.free(), wanted).values():
        if isinstance(made, NoRoom):
            say(f"warning: has to wait: {made}")
        else:
            homes |= {bundle.node_id for bundle in made.bundles}
    return homes


def judge(node: Node, findings: list[dict[str, str]], *, planned: bool, say: Callable[[str], None]) -> None:
    """Raise ``ValueError`` for what one node cannot do; a node on which no engine is planned may lack checkpoints."""
    for finding in findings:
        text = f"node {node.title}: {finding['text']}"
        if finding["name"].startswith("model ") and not planned:
            if node.npus:
                say(f"warning: {text}; no engine can be placed there")
            continue
        raise ValueError(f"{text}; {finding['remedy']}")


def _look(
    ports: list[tuple[str, str, int]],
    models: list[tuple[str, str]],
    python: str,
    gateway: GatewayConfig,
    router: RouterConfig,
) -> list[dict[str, str]]:
    """Runs on a node: what fails there. The doors may come to open on any node, and an engine starts its workers on
    other nodes with its own path of Python.
    """
    found = [free_port(*port) for port in ports if port[1] in ("0.0.0.0", "::", "127.0.0.1", "::1")]
    found.append(doors_of(gateway, router))
    found += hardware.sources(models)
    if not os.access(python, os.X_OK):
        text, remedy = f"{python} is not there", "install npufleet at the same path on every node"
        found.append(Finding(name="python", level=Level.FAIL, text=text, remedy=remedy))
    return [
        {"name": finding.name, "text": finding.text, "remedy": finding.remedy}
        for finding in found
        if finding.level is Level.FAIL
    ]
