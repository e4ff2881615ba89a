"""What `npufleet serve` sees before it starts anything: files, ports, NPUs, the cluster it is told to join.

Each failure is a ``ValueError`` that names what was given and how to mend it, unless said otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from . import checkpoint, env
from .checkpoint import memory as checkpoint_memory
from .config import FleetConfig, GatewayConfig, MetricsConfig, RouterConfig
from .device import Device
from .doctor.finding import Level
from .doctor.local import free_port
from .placement import planner, requests
from .placement.plan import NoRoom, Plan
from .placement.rank_table import rank_table
from .topology.model import Topology

CONNECT_S = 5.0


def files(config: FleetConfig, say: Callable[[str], None]) -> None:
    """Look at the checkpoints; ``say`` is told what is odd about them."""
    for model in config.models:
        for doubt in checkpoint.check(model.name, Path(model.source), model.engine):
            say(f"warning: {doubt}")


def memory(config: FleetConfig, found: Device) -> None:
    """See that the models fit into the NPUs' memory where that is known."""
    if found.memory is None:
        return
    for model in config.models:
        checkpoint_memory.check(model.name, Path(model.source), model.engine, found.memory)


def ports(config: FleetConfig) -> None:
    """See that the fleet can listen where it is told to."""
    wanted = [
        ("gateway", config.gateway.host, config.gateway.port),
        ("router", config.router.host, config.router.port),
        ("metrics", config.metrics.host, config.metrics.port),
    ]
    takers: dict[int, str] = {}
    for what, host, port in wanted:
        if port and port in takers:  # on two addresses of one machine it could do, and nobody means it
            raise ValueError(
                f"{takers[port]}.port and {what}.port are both {port}; give each its own (0 takes a free one)"
            )
        takers[port] = what
        finding = free_port(what, host, port)
        if finding.level is Level.FAIL:
            raise ValueError(f"{finding.text}; {finding.remedy}")


def with_free_ports(config: FleetConfig) -> FleetConfig:
    """Return ``config`` with a free port wherever it says 0: everybody who is told of a door must know it."""
    with contextlib.ExitStack() as held:  # all at once, so that no two are the same
        found = {name: _free_port(getattr(config, name), held) for name in ("gateway", "router", "metrics")}
    return replace(
        config,
        gateway=replace(config.gateway, port=found["gateway"]),
        router=replace(config.router, port=found["router"]),
        metrics=replace(config.metrics, port=found["metrics"]),
    )


def _free_port(door: GatewayConfig | RouterConfig | MetricsConfig, held: contextlib.ExitStack) -> int:
    if door.port:
        return door.port
    probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in door.host else socket.AF_INET))
    probe.bind((door.host, 0))
    port: int = probe.getsockname()[1]
    return port


def npus(config: FleetConfig, found: Device) -> None:
    """See that the machine has as many NPUs as the engines need."""
    if config.npus <= found.count:
        return
    asked = " + ".join(f"{m.engines} x {m.npus} for {m.name}" for m in config.models)
    remedy = "lower --replicas or --tensor-parallel"
    if any(model.npus > model.tensor_parallel_size for model in config.models):
        remedy = "lower --replicas, --tensor-parallel or the other sizes of an engine"
    if found.kind == "virtual":
        remedy += f", or present more: {env.DEVICE}=virtual:{config.npus}"
    raise ValueError(f"{config.npus} NPUs are asked for ({asked}), {found} are here; {remedy}")


def layout(config: FleetConfig, topology: Topology) -> None:
    """See that all engines together can be placed on these nodes by the rules, if nothing else runs there."""
    wanted = [
        requests.of(model, f"{model.name} {i}") for model in config.models for i in range(model.engines)
    ]
    made = planner.plan_all(topology, planner.idle(topology), wanted)
    refused = [error for error in made.values() if isinstance(error, NoRoom)]
    if not refused:
        _rank_tables(config, topology, made)
        return
    never = next((error for error in refused if error.never), None)
    if never is not None:
        raise ValueError(f"{never}")
    asked = " + ".join(
        f"{model.engines} x {requests.of(model, '').npus} for {model.name}" for model in config.models
    )
    healthy = sum(node.usable.bit_count() for node in topology.nodes)
    raise ValueError(
        f"{len(refused)} of {len(wanted)} engines find no room even if nothing else runs: {asked} NPUs are asked "
        f"for, {healthy} healthy ones are there; {refused[0]}"
    )


def _rank_tables(config: FleetConfig, topology: Topology, made: Mapping[str, Plan | NoRoom]) -> None:
    """See that the rank tables that are asked for can be written."""
    nodes = {node.node_id: node for node in topology.nodes}
    for model in config.models:
        plan = made[f"{model.name} 0"]
        if model.rank_table and isinstance(plan, Plan):
            try:
                rank_table(plan, nodes)
            except ValueError as error:
                raise ValueError(f"model {model.name!r}: rank_table: {error}") from error


def cluster(address: str) -> None:
    """See whether a Ray cluster listens at ``address``: Ray itself would look for minutes, and then exit.

    Raises:
        ValueError: if it is no address.
        OSError: if nothing listens there, or something else than Ray.
    """
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--address {address!r}: expected 'auto' or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except UnicodeError as error:
        raise ValueError(f"--address {address!r}: {error}") from error
    if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
        _speaks_ray(address)


def _speaks_ray(address: str) -> None:
    """See whether what listens there is the head of a Ray cluster. OSError if it is not."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=CONNECT_S)
        except grpc.RpcError as error:
            # A cluster that asks for a token refuses the question, and is one all the same.
            unknown = (
                grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
            )  # fmt: skip
            if error.code() in unknown:
                raise ConnectionError("what listens there is not the head of a Ray cluster") from error
