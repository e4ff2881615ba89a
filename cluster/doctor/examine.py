"""All checks of one machine, in the order in which they are shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from .. import device, doors, env
from ..config import FleetConfig, GatewayConfig, RouterConfig
from . import hardware, local, reach, stack
from .finding import Finding, Level

Port = tuple[str, str, int]
DOORS = "doors"


def machine(
    ports: Iterable[Port] | None = None, models: Iterable[tuple[str, str]] = (), *, meet: bool = False
) -> Iterator[Finding]:
    """Yield all findings about this machine, cheap ones first.

    Args:
        ports: (what for, host, port) that must be free; the default ports if None.
        models: (name, checkpoint folder) that this machine must be able to read.
        meet: whether two of its NPUs shall run an all-reduce, which takes some seconds.
    """
    yield local.python()
    yield from local.versions()
    found = local.devices()
    yield found
    kind = "virtual" if "virtual" in found.text else "npu"
    yield from stack.cann_and_driver(kind)
    if kind == "npu":
        yield from hardware.npus()
    yield from (local.free_port(*entry) for entry in (local.default_ports() if ports is None else ports))
    yield local.shared_memory()
    yield local.open_files()
    yield hardware.huge_pages()
    yield hardware.ephemeral_ports()
    yield hardware.disk(env.home())
    yield from hardware.sources(models)
    if meet and found.level is not Level.FAIL:
        yield reach.local(tuple(range(min(2, device.detect().count))))


def ports_of(config: FleetConfig) -> list[Port]:
    """Return the ports of a configuration that are not left to the system."""
    doors = (("gateway", config.gateway), ("router", config.router), ("metrics", config.metrics))
    return [(name, door.host, door.port) for name, door in doors if door.port]


def doors_of(gateway: GatewayConfig, router: RouterConfig) -> Finding:
    """Check what router and gateway read before they open their doors."""
    try:
        doors.check(gateway, router)
    except ValueError as error:
        remedy = "router and gateway may open their doors on any node: put the file on each"
        return Finding(name=DOORS, level=Level.FAIL, text=str(error), remedy=remedy)
    return Finding(name=DOORS, level=Level.OK, text="keys, certificates and secret can be read")


def models_of(config: FleetConfig) -> list[tuple[str, str]]:
    """Return the models of a configuration whose checkpoints are folders."""
    return [(model.name, model.source) for model in config.models if os.path.isabs(model.source)]
